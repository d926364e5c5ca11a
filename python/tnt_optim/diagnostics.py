"""Figures about an optimizer, for a log."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tnt_kernels import mode_products
from tnt_optim.autograd import without_autocast
from tnt_optim.modes import State, blocks, buckets_of, by_device, each, is_sharded, layout_of, rows

# The power method gives a condition number's order of magnitude after this many steps.
_POWER_STEPS = 8
# Factors of one size are stacked up to this many entries: few calls for many small factors. A
# larger factor is not copied.
_STACK = 1 << 18

Pair = tuple[Tensor, Tensor]
# The name of a figure, and its parameter; a parameter has several values if it has several blocks
# or modes.
Key = tuple[str, Tensor]


@torch.no_grad()
def diagnostics(
    states: Mapping[Tensor, State], names: Mapping[Tensor, str], *, multiplies: bool
) -> dict[str, float]:
    """Figures of parameters with factors in this process; see ``TNT.diagnostics``.

    Direction norms and condition numbers exist only if the method ``multiplies`` momenta by
    factors. The host waits once for each device.
    """
    held = [p for p in states if p.numel() > 0]
    counts = ("skipped_statistics", "failed_inverses")
    figures = {f"{count}/{names[p]}": float(states[p][count]) for p in held for count in counts}
    for params in by_device(held):
        keys: list[Key] = []
        values: list[Tensor] = []
        with without_autocast(params[0]):
            for some_keys, some_values in _figures(params, states, multiplies):
                keys += some_keys
                values.append(some_values.double())
        by_key: dict[Key, list[float]] = {}
        for key, value in zip(keys, torch.cat(values).tolist(), strict=True):
            by_key.setdefault(key, []).append(value)
        for (figure, param), parts in by_key.items():
            combine = _largest if figure == "condition" else math.hypot
            figures[f"{figure}/{names[param]}"] = combine(*parts)
    return dict(sorted(figures.items()))


def _figures(
    params: Sequence[Tensor], states: Mapping[Tensor, State], multiplies: bool
) -> Iterator[tuple[list[Key], Tensor]]:
    """Keys and their values: norms of tensors or blocks, and condition numbers of factors."""
    whole = [p for p in params if not is_sharded(p)]  # other norms need all processes
    if whole:
        yield _norms("parameter_norm", whole, whole)
    yield _norms("momentum_norm", params, each([states[p] for p in params], "momentum"))
    if not multiplies:
        return
    for part in buckets_of(params):
        bucket = params[part]
        bucket_states = [states[p] for p in bucket]
        layouts = list(map(layout_of, bucket_states))
        momenta = blocks(each(bucket_states, "momentum"), layouts)
        directions = mode_products(momenta, rows(each(bucket_states, "factors"), layouts))
        of_blocks = [p for p, layout in zip(bucket, layouts, strict=True) for _ in layout.cuts]
        yield _norms("direction_norm", of_blocks, directions)
    alike: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, Pair]]] = {}
    for param in params:
        if states[param].get("stats"):  # otherwise the owner rank has this figure, or there is none
            for pair in zip(states[param]["stats"], states[param]["factors"], strict=True):
                alike.setdefault((pair[1].shape, pair[1].dtype), []).append((param, pair))
    for (shape, _), members in alike.items():
        count = max(1, _STACK // shape.numel())
        for start in range(0, len(members), count):
            stack = members[start : start + count]
            stats, factors = (_stacked([pair[which] for _, pair in stack]) for which in (0, 1))
            yield [("condition", param) for param, _ in stack], conditions(stats, factors)


def _norms(
    figure: str, params: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[list[Key], Tensor]:
    # Squares of small numbers underflow in float32, and half precision would round the norm.
    norms = torch._foreach_norm(list(tensors), 2, torch.float64)
    return [(figure, param) for param in params], torch.stack(norms)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(list(matrices))


def conditions(stats: Tensor, factors: Tensor) -> Tensor:
    """The condition numbers of n factors, (n, d, d) or (n, d), estimated from below.

    If A is the factor of S, the eigenvector of S's largest eigenvalue belongs to A's smallest. The
    ``factors`` were computed some steps before ``stats``.
    """
    if factors.dim() == 2:
        return factors.amax(1) / factors.amin(1)
    diagonals = stats.diagonal(dim1=1, dim2=2)
    start = 1 + diagonals / diagonals.amax(1, keepdim=True).clamp_min(1e-30)
    largest, top = _power(factors, start), _power(stats, start)
    smallest = _times(factors, top).mul_(top).sum(1)
    return _times(factors, largest).mul_(largest).sum(1) / smallest


def _power(matrices: Tensor, start: Tensor) -> Tensor:
    """Unit vectors near the eigenvectors of the largest eigenvalues; the start if that is 0."""
    vectors: Tensor = start / start.norm(dim=1, keepdim=True)
    for _ in range(_POWER_STEPS):
        images = _times(matrices, vectors)
        norms = images.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > 0, images / norms, vectors)
    return vectors


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Each symmetric matrix times its vector."""
    # Row vectors: batches of column vectors are several times slower on the CPU.
    return torch.bmm(vectors.unsqueeze(1), matrices).squeeze(1)


def _largest(*values: float) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
