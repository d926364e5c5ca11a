"""``python -m tools.launch_counts``: what one call launches on a GPU, counted from its plan.

For each set of parameters: the Gram matrices, and the mode products, of all its tensors at once, in
float32 at "highest" on an H200. Modes of more than 8192 indices are diagonal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, write_json
from tnt_kernels.benchmark.tables import table
from tnt_kernels.triton import chain, gram_ema, pack
from tnt_kernels.triton.launch import Layout, contiguous
from tools.measuring.parameter_sets import PARAMETER_SETS

CPU, SETTING = torch.device("cpu"), "tf32x3"
MULTIPROCESSORS = 132
SLOTS = 2 * MULTIPROCESSORS  # large tiles take 128 registers, so two programs share one
SETS = ("mnist_ae", "faces_ae", "resnet32", "vgg16", "gpt2_full", "square4096")


def _layout(shape: tuple[int, ...]) -> Layout:
    return contiguous(Layout(shape, (), torch.float32, True))


def _packed_bytes(problems: Tensor) -> int:
    """The bytes that packs write, from their table."""
    rows = problems.view(-1, pack.PACK_FIELDS.value)
    read = rows[rows[:, pack.COLUMN_AXIS.value] > 0]  # the others write padding only
    numbers = read[:, pack.ROW_AXIS.value] * read[:, pack.TARGET_STRIDE.value]
    return 4 * int(numbers.sum())


def _row(name: str, operator: str) -> dict[str, Any]:
    """The counts of one call."""
    parameters = PARAMETER_SETS[name]
    tensors = tuple(map(_layout, parameters.views))
    states = tuple(_layout(shape) for shapes in parameters.matrices for shape in shapes)
    plan: Any
    if operator == "gram_ema_":
        plan = gram_ema.plan(tensors, states, CPU, MULTIPROCESSORS, (), SETTING)
        products = [count for wave in plan.waves for _, count, _ in wave.grams]
        launches = sum(len(part) for wave in plan.waves for part in wave)
        launches += len(plan.diagonal_tiles)
    else:
        plan = chain.plan(tensors, tensors, states, CPU, MULTIPROCESSORS, SETTING)
        kinds = [(kind, count) for kind, count, _ in plan.launches]
        products = [count for kind, count in kinds if not isinstance(kind, pack.Packing)]
        launches = len(kinds)
    slots = sum(-(-count // SLOTS) * SLOTS for count in products)
    return {
        "set": name,
        "operator": operator,
        "launches": launches,
        "packed_bytes": _packed_bytes(plan.packed),
        "workspace_bytes": plan.scratch,
        "programs": sum(products),
        "slot_efficiency": sum(products) / slots,
    }


def main() -> None:
    """Counts, prints a table and writes the record."""
    parser = argparse.ArgumentParser(prog="python -m tools.launch_counts", description=__doc__)
    default = Path(__file__).parents[1] / "bench" / "results" / "launch_counts.json"
    parser.add_argument("--out", type=Path, default=default, help="the record")
    out = check_writable(parser.parse_args().out)
    rows = [_row(name, operator) for name in SETS for operator in ("gram_ema_", "mode_products")]
    write_json(out, {"provenance": provenance(), "slots": SLOTS, "rows": rows})
    header = [
        "set",
        "operator",
        "launches",
        "packed, MB",
        "workspace, MB",
        "programs",
        "slots used",
    ]
    cells = [
        [
            *(r["set"], r["operator"], r["launches"]),
            *(f"{r[key] / 1e6:.0f}" for key in ("packed_bytes", "workspace_bytes")),
            *(r["programs"], f"{r['slot_efficiency']:.0%}"),
        ]
        for r in rows
    ]
    sys.stdout.write("\n".join(table(header, cells)) + "\n")


if __name__ == "__main__":
    main()
