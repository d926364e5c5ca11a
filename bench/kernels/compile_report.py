"""``python -m bench.kernels.compile_report``: what the compilers make of every GPU kernel.

Every Triton kernel in every class that the launchers can choose, and every CUDA file, compiled for
several architectures on a machine that needs no GPU. Writes ``compile_report.json`` and
``compile_report.md``; the exit status is 1 where an expectation is missed
(``compile_expectations.py``). Nothing is run, and nothing here is a time.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.kernels import cuda_code
from bench.kernels.compile_expectations import (
    COMPILES,
    EXPECTATIONS,
    NARROW,
    RECORDED,
    SUPPORTED,
    Miss,
    misses,
    unneeded,
)
from bench.kernels.machine_code import Compiled, compiled
from bench.kernels.occupancy import ARCHITECTURES
from bench.kernels.recorded_launches import Launch, kernels, recorded
from tools.measuring.provenance import provenance
from tools.measuring.records import write_json
from tools.measuring.tables import table

OLDER = (75,)  # without TF32: float32 products in IEEE arithmetic
PROCESSES = 2
UNNAMED = ("num_warps", "SPAN", "STRIPS")  # in the tables: the same everywhere


def is_main(launch: Launch) -> bool:
    """Whether a class belongs to the selection that the tests compile.

    Left out: float16, which compiles like bfloat16, and gradients of another dtype than momenta.
    """
    dtypes = {launch.settings.get(name) for name in ("ELEMENT", "RESULT")} - {None}
    state = launch.settings.get("STATE")
    if "fp16" in dtypes or launch.name.endswith("momentum_kernel") and dtypes != {state}:
        return False
    return len(dtypes) < 2 or dtypes == {state}


@functools.cache
def _launches(capability: int, main_only: bool) -> list[Launch]:
    return [la for la in recorded(capability) if is_main(la) or not main_only]


def _compile_one(capability: int, main_only: bool, index: int) -> list[Compiled]:
    return [compiled(_launches(capability, main_only)[index], capability)]


def compile_all(capabilities: Sequence[int], *, main_only: bool) -> list[Compiled]:
    """Everything, in two processes and with a fresh cache, in the order of launches and files."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # the processes inherit it
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            jobs: list[Future[list[Compiled]]] = [
                pool.submit(_compile_one, capability, main_only, index)
                for capability in capabilities
                for index in range(len(_launches(capability, main_only)))
            ]
            if cuda_code.why_no_compiler() is None:
                jobs += [
                    pool.submit(cuda_code.compiled_file, source, capability)
                    for capability in capabilities
                    if capability in SUPPORTED
                    for source in cuda_code.sources()
                ]
            return [entry for job in jobs for entry in job.result()]


def class_of(settings: Any) -> str:
    """Constants as the tables name a class.

    >>> class_of({"ELEMENT": "fp32", "VECTOR": 4, "UPDATE": True, "LAST": False, "num_warps": 4})
    'ELEMENT fp32, VECTOR 4, UPDATE'
    """
    said = []
    for name, value in settings.items():
        if name not in UNNAMED and value is not False:
            said.append(name if value is True else f"{name} {value}")
    return ", ".join(said)


def loads_of(c: Compiled) -> str:
    """The bytes of every load in a loop, by where it is: the least where they differ.

    Empty where there is none.
    """
    places: dict[str, list[str]] = {}
    for name, widths in c.loads.items():
        place, _, what = name.rpartition(": ")
        places.setdefault(place, []).append(f"{what} {'/'.join(map(str, widths))}")
    return "; ".join(f"{p}: {', '.join(w)}" if p else ", ".join(w) for p, w in places.items())


def _row(c: Compiled) -> tuple[str, ...]:
    start = (c.kernel, class_of(c.settings), f"sm_{c.capability}")
    if c.error:
        return (*start, *["-"] * 4, f"**does not compile**: {c.error}", "")
    held = c.occupancy
    spilled = (c.stack, c.spill_loads, c.spill_stores)
    products = sorted(set(c.products.values())) or [f"({name})" for name in c.instructions]
    return (
        *start,
        str(c.registers),
        "0" if not any(spilled) else f"**{c.stack}, {c.spill_loads}/{c.spill_stores}**",
        str(c.shared) + (f" + {c.tensor_memory} columns" if c.tensor_memory else ""),
        f"{held.blocks} × {c.warps} ({100 * held.share:.0f} %, {held.limit})",
        ", ".join(products),
        loads_of(c),
    )


def _missed(found: Iterable[Miss], told: str) -> list[str]:
    lines = [f"- `{m.kernel}` ({class_of(m.settings)}), sm_{m.capability}: {m.what}" for m in found]
    return [told, "", *(lines or ["- none"]), ""]


def page(record: dict[str, Any], entries: Sequence[Compiled]) -> str:
    """The whole page."""
    origin = record["provenance"]
    missed = [Miss(**m) for m in record["missed"]]
    older = [m for m in missed if m.capability in OLDER]
    missed = [m for m in missed if m.capability not in OLDER]
    counts = [
        (said, str(sum(m.expectation == said for m in missed)))
        for said in (COMPILES, RECORDED, *EXPECTATIONS)
    ]
    architectures = [
        (f"sm_{c}", *(str(value) for value in asdict(a).values())) for c, a in ARCHITECTURES.items()
    ]
    no_nvcc = cuda_code.why_no_compiler()
    header = ["kernel", "class", "for", "registers", "stack, LDL/STL", "shared memory, bytes"]
    header += ["resident blocks × warps", "product", "loads in loops, bytes"]
    return "\n".join(
        [
            "# What the compilers make of the GPU kernels",
            "",
            f"Commit {(origin['commit'] or 'unknown')[:12]}"
            f"{' with changes' if origin['dirty'] else ''}, {origin['date'][:10]}, Triton "
            f"{origin['versions']['triton']}; `{origin['command']}`. Compiled without a GPU, "
            f"{len(entries)} classes in {record['seconds']:.0f} s: nothing was run, nothing here "
            "is a time.",
            "",
            "The classes are those that the launchers choose: they are called on CPU tensors of "
            "every dtype, aligned and not, while their launches are recorded. Registers and stack "
            "are cuobjdump's; loads and products are ascribed to lines of source by nvdisasm.",
            "",
            *([f"The CUDA files were not compiled: {no_nvcc}.", ""] if no_nvcc else []),
            "## Expectations",
            "",
            *table(("expected", "missed by"), counts),
            *_missed(missed, "Missed:"),
            *_missed(older, "On sm_75, which is only reported (it has no TF32 and no bfloat16):"),
            "Loads that are known to be narrow in wide classes:",
            "",
            *(
                f"- `{n.kernel}`, {', '.join(f'`{load}`' for load in n.loads)}, "
                f"{', '.join(f'{k} {v}' for k, given in n.settings.items() for v in given)}, "
                f"{', '.join(f'sm_{c}' for c in n.capabilities)}: {n.reason}"
                for n in NARROW
            ),
            "",
            *record["unneeded"],
            "## Occupancy",
            "",
            "The least of four limits, by NVIDIA's `cuda_occupancy.h` (registers are given to "
            "warps in units of 256 and to a quarter of the multiprocessor at a time, shared memory "
            "to blocks in units of 128 bytes beside what is reserved), and of tensor memory (512 "
            "columns). The dynamic shared memory of a CUDA kernel is chosen at its launch and not "
            "counted: one that has any is resident in fewer blocks than the table says.",
            "",
            *table(
                ("", "warps", "blocks", "shared memory, bytes", "of one block", "reserved"),
                architectures,
            ),
            "## Kernels",
            "",
            "In brackets: instructions of kernels without products of tiles.",
            "",
            *table(header, [_row(c) for c in sorted(entries, key=_order)]),
        ]
    )


def _order(c: Compiled) -> tuple[str, str, str, int]:
    return (c.source != "triton" and c.source or "", c.kernel, class_of(c.settings), c.capability)


def main() -> int:
    """Compiles what the command line asks for; returns 1 where an expectation is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels.compile_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--main", action="store_true", help="fewer dtypes, sm_80 and sm_90 only")
    parser.add_argument("--output", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    origin, start = provenance(), time.perf_counter()
    capabilities = SUPPORTED[:2] if options.main else (*SUPPORTED, *OLDER)
    try:
        entries = compile_all(capabilities, main_only=options.main)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    found = misses(entries, kernels())
    record = {
        "provenance": origin,
        "seconds": time.perf_counter() - start,
        "cuda": cuda_code.why_no_compiler() or "compiled",
        "missed": [asdict(m) for m in found],
        # A selection does not have them all.
        "unneeded": []
        if options.main
        else [f"- `{n.kernel}`: not narrow any more: {n.loads}\n" for n in unneeded(entries)],
        "entries": [c.record() for c in entries],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "compile_report.json", record)
    path = options.output / "compile_report.md"
    path.write_text(page(record, entries), encoding="utf-8")
    expected = [m for m in found if m.capability not in OLDER]
    for m in expected:
        print(f"{m.kernel} ({class_of(m.settings)}), sm_{m.capability}: {m.what}", file=sys.stderr)
    print(f"{len(entries)} classes, {len(expected)} misses, {record['seconds']:.0f} s: {path}")
    return 1 if expected else 0


if __name__ == "__main__":
    sys.exit(main())
