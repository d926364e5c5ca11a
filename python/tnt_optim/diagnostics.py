"""Figures that tell how an optimizer is doing, for a log."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tnt_kernels import mode_products
from tnt_optim.processes import is_sharded
from tnt_optim.states import State, layout_of

# A condition number is wanted to an order of magnitude: the power method has that much early.
_POWER_STEPS = 8


@torch.no_grad()
def diagnostics(states: Mapping[Tensor, State], names: Mapping[Tensor, str]) -> dict[str, float]:
    """Figures of each parameter; see ``TNT.diagnostics``. Waits for the device once.

    Args:
        states: of parameters whose factors this process has.
        names: theirs.
    """
    keys: list[str] = []
    values: list[Tensor] = []
    found: dict[str, float] = {}
    for param, state in states.items():
        if param.numel() == 0:
            continue
        name, seen = names[param], layout_of(state)
        factors = seen.rows(state["factors"])
        direction = mode_products(seen.blocks(state["momentum"]), factors)
        figures = {
            "momentum_norm": state["momentum"].norm(),
            "direction_norm": torch.stack([part.norm() for part in direction]).norm(),
        }
        if not is_sharded(param):  # whose norm would take all processes
            figures["parameter_norm"] = param.norm()
        if "stats" in state:
            pairs = zip(state["stats"], state["factors"], strict=True)
            figures["condition"] = torch.stack([condition(s, a) for s, a in pairs]).amax()
        keys += [f"{figure}/{name}" for figure in figures]
        values += [value.double() for value in figures.values()]
        for count in ("skipped_statistics", "failed_inverses"):
            found[f"{count}/{name}"] = float(state[count])
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    for indices in by_device.values():
        told = torch.stack([values[i] for i in indices]).tolist()
        found.update(zip((keys[i] for i in indices), told, strict=True))
    return dict(sorted(found.items()))


def condition(stat: Tensor, factor: Tensor) -> Tensor:
    """The condition number of a factor, estimated from below.

    The eigenvector of the largest eigenvalue of S is that of the smallest of A, if A was made from
    this S: it was made from an S of a few steps ago.

    Args:
        stat: S, (d, d) or (d,).
        factor: A, like it.
    """
    if factor.dim() == 1:
        return factor.amax() / factor.amin()
    start = torch.ones_like(stat[0]) + stat.diagonal() / stat.diagonal().amax().clamp_min(1e-30)
    largest = _power(factor, start)
    top = _power(stat, start)
    smallest = top @ factor @ top
    return (largest @ factor @ largest) / smallest


def _power(matrix: Tensor, start: Tensor) -> Tensor:
    """A unit vector near the eigenvector of the largest eigenvalue; the start where that is 0."""
    vector: Tensor = start / start.norm()
    for _ in range(_POWER_STEPS):
        image = matrix @ vector
        norm = image.norm()
        vector = torch.where(norm > 0, image / norm, vector)
    return vector
