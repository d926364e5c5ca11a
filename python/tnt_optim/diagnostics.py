"""Figures that tell how an optimizer is doing, for a log."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tnt_kernels import mode_products
from tnt_optim.autograd import without_autocast
from tnt_optim.distributed.process_group import is_sharded
from tnt_optim.state import State, blocks, each, is_half, layout_of, rows
from tnt_optim.update import lots_of

# A condition number is wanted to an order of magnitude: the power method has that much early.
_POWER_STEPS = 8
# So many numbers of factors of one size are looked at together: few calls for many small ones, and
# no memory to speak of for large ones, of which no copy is made.
_STACK = 1 << 18

Pair = tuple[Tensor, Tensor]
# A figure's name and the parameter that it is of; of several blocks or modes it has several.
Key = tuple[str, Tensor]


@torch.no_grad()
def diagnostics(states: Mapping[Tensor, State], names: Mapping[Tensor, str]) -> dict[str, float]:
    """Figures of each parameter; see ``TNT.diagnostics``. Waits once for each device.

    Args:
        states: of parameters whose factors this process has.
        names: theirs.
    """
    on_device: dict[torch.device, list[Tensor]] = {}
    found: dict[str, float] = {}
    for param, state in states.items():
        if param.numel() == 0:
            continue
        on_device.setdefault(param.device, []).append(param)
        for count in ("skipped_statistics", "failed_inverses"):
            found[f"{count}/{names[param]}"] = float(state[count])
    for params in on_device.values():
        keys: list[Key] = []
        values: list[Tensor] = []
        with without_autocast(params[0]):
            for of, parts in _figures(params, states):
                keys += of
                values.append(parts.double())
        told: dict[Key, list[float]] = {}
        for key, value in zip(keys, torch.cat(values).tolist(), strict=True):
            told.setdefault(key, []).append(value)
        for (figure, param), numbers in told.items():
            put_together = _largest if figure == "condition" else math.hypot
            found[f"{figure}/{names[param]}"] = put_together(*numbers)
    return dict(sorted(found.items()))


def condition(stat: Tensor, factor: Tensor) -> Tensor:
    """The condition number of a factor, estimated from below.

    The eigenvector of the largest eigenvalue of S is that of the smallest of A, if A was made from
    this S: it was made from an S of a few steps ago.

    Args:
        stat: S, (d, d) or (d,).
        factor: A, like it.
    """
    return _conditions(stat.unsqueeze(0), factor.unsqueeze(0))[0]


def _figures(
    params: Sequence[Tensor], states: Mapping[Tensor, State]
) -> Iterator[tuple[list[Key], Tensor]]:
    """Keys and as many numbers: norms of whole tensors or blocks, condition numbers of factors."""
    whole = [p for p in params if not is_sharded(p)]  # the norm of others takes all processes
    if whole:
        yield _norms("parameter_norm", whole, whole)
    yield _norms("momentum_norm", params, each([states[p] for p in params], "momentum"))
    for part in lots_of(params):
        lot = params[part]
        own = [states[p] for p in lot]
        seen = list(map(layout_of, own))
        momenta = blocks(each(own, "momentum"), seen)
        directions = mode_products(momenta, rows(each(own, "factors"), seen))
        of = [p for p, look in zip(lot, seen, strict=True) for _ in range(look.count)]
        yield _norms("direction_norm", of, directions)
    alike: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, Pair]]] = {}
    for param in params:
        if "stats" in states[param]:  # or the process that has them has this figure too
            for pair in zip(states[param]["stats"], states[param]["factors"], strict=True):
                alike.setdefault((pair[1].shape, pair[1].dtype), []).append((param, pair))
    for (shape, _), members in alike.items():
        count = max(1, _STACK // shape.numel())
        for start in range(0, len(members), count):
            some = members[start : start + count]
            stats, factors = (_stacked([pair[which] for _, pair in some]) for which in (0, 1))
            yield [("condition", param) for param, _ in some], _conditions(stats, factors)


def _norms(
    figure: str, of: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[list[Key], Tensor]:
    # In half precision a norm would be rounded, or leave float16's range.
    wide = [tensor.double() if is_half(tensor) else tensor for tensor in tensors]
    return [(figure, param) for param in of], torch.stack(torch._foreach_norm(wide))


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(list(matrices))


def _conditions(stats: Tensor, factors: Tensor) -> Tensor:
    """See ``condition``: of n factors, (n, d, d) or (n, d)."""
    if factors.dim() == 2:
        return factors.amax(1) / factors.amin(1)
    diagonals = stats.diagonal(dim1=1, dim2=2)
    start = 1 + diagonals / diagonals.amax(1, keepdim=True).clamp_min(1e-30)
    largest, top = _power(factors, start), _power(stats, start)
    smallest = _times(factors, top).mul_(top).sum(1)
    return _times(factors, largest).mul_(largest).sum(1) / smallest


def _power(matrices: Tensor, start: Tensor) -> Tensor:
    """Unit vectors near the eigenvectors of the largest eigenvalues; the start where that is 0."""
    vectors: Tensor = start / start.norm(dim=1, keepdim=True)
    for _ in range(_POWER_STEPS):
        images = _times(matrices, vectors)
        norms = images.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > 0, images / norms, vectors)
    return vectors


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Each symmetric matrix times its vector."""
    # From the left: batches of columns are several times slower on the CPU.
    return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)


def _largest(*numbers: float) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
