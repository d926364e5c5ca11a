"""What a step of an optimizer costs on large models and many GPUs, counted, not measured.

AdamW, Muon and SOAP take their steps on tensors without data, and every operator's products and
bytes are counted. TNT's come from `bench.work`. An operator reads each input once and writes each
output once, so fused ones move less. With `fully_shard` every parameter has one owner, which keeps
its state and computes its step; AdamW alone works on pieces. Owners are assigned as TNT does it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tools.measuring.packages import require_bench

require_bench()

import torch
import typer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from bench.report import new_record, write
from bench.work import grafted_work, inverse_work, scaled_work, whitened_work
from tnt_optim import TNT
from tnt_optim.distributed.ownership import Load, assign
from tools.measuring.parameter_sets import ParameterSet, Shape, gpt2
from tools.measuring.tables import table

TOKENS = 2**19  # in a batch, as GPT-2's
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Model:
    """A transformer in the shapes of GPT-2."""

    label: str
    blocks: int
    width: int
    context: int

    @property
    def shapes(self) -> list[Shape]:
        """Of its parameters; the first two are embeddings."""
        return gpt2(self.blocks, self.width, self.context)

    @property
    def numbers(self) -> int:
        """How many it has."""
        return sum(map(math.prod, self.shapes))

    @property
    def flops(self) -> float:
        """Forward and backward of a batch: 6 a parameter and token, and causal attention."""
        attention = 6 * self.blocks * self.width * self.context
        return float(TOKENS * (6 * self.numbers + attention))


MODELS = (
    Model("GPT-2 small", 12, 768, 1024),
    Model("1.3 B", 24, 2048, 2048),
    Model("6.7 B", 32, 4096, 2048),
)


class Cost(NamedTuple):
    """A mean step of one parameter."""

    flops: float
    bytes: float  # moved by the operators
    state: float  # bytes


class _Bytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        # A view moves nothing; what is written in place is read and written.
        if not func.is_view:
            tensors = tree_leaves((args, kwargs, found))
            self.total += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
        return found


# Householder's R and Q of a square matrix; PyTorch counts products only.
_FLOPS = {torch.ops.aten.linalg_qr: lambda shape, *_, **__: 8 * shape[-1] ** 3 // 3}


def counted(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shape: Shape) -> Cost:
    """The mean of ten steps of one parameter, after two first ones, which make the state."""
    param = nn.Parameter(torch.empty(shape, device="meta"))
    param.grad = torch.empty_like(param)
    opt = make([param])
    for _ in range(2):
        opt.step()
    moved = _Bytes()  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False, custom_mapping=_FLOPS) as flops, moved:
        for _ in range(10):
            opt.step()
    state = [t for t in tree_leaves(opt.state_dict()) if isinstance(t, Tensor) and t.dim() > 0]
    return Cost(flops.get_total_flops() / 10, moved.total / 10, sum(t.nbytes for t in state))


def adamw(shape: Shape) -> Cost:
    """AdamW's fused step: reads weight, gradient and two moments, writes all but the gradient."""
    size = FLOAT_BYTES * math.prod(shape)
    return Cost(0.0, 7.0 * size, 2.0 * size)


@functools.cache
def muon(shape: Shape) -> Cost:
    """Muon's step of a hidden matrix."""
    return counted(torch.optim.Muon, shape)


@functools.cache
def soap(shape: Shape) -> Cost:
    """SOAP's step, with eigenbases every ten steps."""
    from pytorch_optimizer import SOAP

    return counted(lambda params: SOAP(params, precondition_frequency=10), shape)


@functools.cache
def tnt(shape: Shape) -> Cost:
    """The default's step, after the intervals' warm-up, without the sampled backward."""
    opt = TNT([nn.Parameter(torch.empty(shape, device="meta"))])
    state = opt.memory_estimate()["total"]
    if len(shape) == 1:  # moves as AdamW's
        return adamw(shape)._replace(state=state)
    group = opt.param_groups[0]
    one = ParameterSet("", (shape,), max_factor_dim=group["max_factor_dim"])
    parts = [
        (whitened_work(one), 1 / group["stat_interval"]),
        (inverse_work(one), 1 / group["inverse_interval"]),
        (grafted_work(one), 1.0),
        (scaled_work(one), 1.0),
    ]
    flops = math.fsum(share * work.flops for work, share in parts)
    return Cost(flops, math.fsum(share * work.bytes for work, share in parts), state)


def costs(method: str, shapes: Sequence[Shape]) -> list[Cost]:
    """Of every parameter."""
    if method == "Muon":  # AdamW for embeddings and vectors, as Muon's author does
        return [
            muon(shape) if len(shape) == 2 and index > 1 else adamw(shape)
            for index, shape in enumerate(shapes)
        ]
    known: dict[str, Callable[[Shape], Cost]] = {"SOAP": soap, "AdamW": adamw}
    one = known.get(method, tnt)
    return [one(shape) for shape in shapes]


def largest(each: Sequence[Cost], processes: int) -> Cost:
    """The largest flops, bytes and state of an owner."""
    owners = assign(
        [Load(cost.flops + cost.bytes, cost.state) for cost in each], [Load()] * processes
    )
    held = [Cost(0.0, 0.0, 0.0)] * processes
    for cost, owner in zip(each, owners, strict=True):
        held[owner] = total([held[owner], cost])
    return Cost(*(max(column) for column in zip(*held, strict=True)))


def total(each: Sequence[Cost]) -> Cost:
    """The sum of costs."""
    return Cost(*(math.fsum(column) for column in zip(*each, strict=True)))


def sampled_gradients() -> float:
    """How many of TNT's steps have a second backward: a share."""
    default: int = TNT([nn.Parameter(torch.empty(1))]).defaults["stat_interval"]
    return 1 / default


def handed(numbers: int, way: str, processes: int, statistics: float) -> float:
    """Bytes that all processes together hand to collectives in a mean step of TNT.

    As `bench.processes` counts them; the reduction of the gradients is not among them.

    Args:
        numbers: of all parameters.
        way: "every process" or "fully_shard".
        processes: how many.
        statistics: the share of steps with statistics.

    >>> handed(10, "fully_shard", 2, 0.5), handed(10, "every process", 2, 0.5)
    (100.0, 40.0)
    """
    size = FLOAT_BYTES * numbers
    if way == "every process":
        return processes * size * statistics  # an all-reduce of the sampled gradients
    return 2 * size + size * statistics  # pieces to their owners; directions come back


def row(model: Model, method: str, way: str, processes: int) -> dict[str, Any]:
    """One line of the page: of one GPU, the one with the most."""
    each = costs(method, model.shapes)
    if way == "every process":
        cost = total(each)
    elif method == "AdamW":
        cost = Cost(*(value / processes for value in total(each)))
    else:
        cost = largest(each, processes)
    statistics = sampled_gradients() if method == "TNT" else 0.0
    traffic = 0.0
    if processes > 1 and method != "AdamW" and (way == "fully_shard" or statistics):
        traffic = handed(model.numbers, way, processes, statistics) / processes
    backward = 2 / 3 * statistics * model.flops
    return {
        "model": model.label,
        "method": method,
        "way": way,
        "gpus": processes,
        "flops": cost.flops,
        "sampled_flops": backward / processes,
        "model_flops": model.flops / processes,
        "bytes": cost.bytes,
        "state": cost.state,
        "traffic": traffic,
    }


def page(record: Mapping[str, Any]) -> str:
    """The page of a record."""
    header = ["", "shared", "GPUs", "optimizer, TFLOP", "sampled backward, TFLOP"]
    header += ["both, of forward and backward", "moved, GB", "state, GiB", "sent, MB"]
    source = record["provenance"]
    commit, version = source["commit"][:12], source["versions"]["torch"]
    where = f"Commit {commit}, torch {version}, `python -m bench.scale`."
    lines = ["# A step on large models and many GPUs", "", where, "", _TEXT, ""]
    for model in MODELS:
        own = [one for one in record["rows"] if one["model"] == model.label]
        cells = [
            [
                one["method"],
                one["way"] if one["gpus"] > 1 else "",
                one["gpus"],
                f"{one['flops'] / 1e12:.3f}",
                f"{one['sampled_flops'] / 1e12:.3f}" if one["sampled_flops"] else "",
                f"{100 * (one['flops'] + one['sampled_flops']) / one['model_flops']:.1f} %",
                f"{one['bytes'] / 1e9:.2f}",
                f"{one['state'] / 2**30:.2f}",
                f"{one['traffic'] / 1e6:.1f}" if one["traffic"] else "",
            ]
            for one in own
        ]
        batch = model.flops / 1e12
        title = f"{model.label}: {model.numbers / 1e6:.0f} M parameters, {batch:,.0f} TFLOP a batch"
        lines += [f"## {title}", "", *table(header, cells), ""]
    return "\n".join(lines).rstrip() + "\n"


_TEXT = """Counted from shapes and operators, not measured: no GPU was used. Of the GPU with the
most, in a mean step after the intervals' warm-up; a batch has 2^19 tokens, divided among the GPUs;
float32 state. TFLOP are products. "Sent" is what the GPU hands to collectives beyond the reduction
of gradients, as [processes.md](processes.md) measures it; Muon and SOAP are taken to send what
TNT-EF sends. A mode keeps a diagonal above 4096 numbers in TNT, above 10,000 in SOAP. A parameter
has one owner, so the largest parameter limits `fully_shard`. TNT-EF needs no sampled backward."""


def main(
    out: Annotated[Path, typer.Option(help="the record; its page next to it")] = Path(
        "results/scale.json"
    ),
) -> None:
    """Count what a step costs on GPT-2 small, 1.3 B and 6.7 B parameters, on 1 to 512 GPUs."""
    record = new_record(out, "cpu", tokens=TOKENS)
    record["rows"] = [
        row(model, method, way, processes)
        for model in MODELS
        for method in ("TNT", "TNT-EF", "SOAP", "Muon", "AdamW")
        for processes in (1, 8, 64, 512)
        for way in (("every process", "fully_shard") if processes > 1 else ("every process",))
    ]
    write(out, record, page)
    typer.echo(f"wrote {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    typer.run(main)
