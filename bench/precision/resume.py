"""Training that was saved and resumed, beside the same training without a break, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.precision.bits import differing
from bench.precision.digits import Classifier, batch
from tnt_optim import KFAC, TNT, Shampoo, with_fallback

SETTINGS: dict[str, Any] = {"lr": 0.01, "damping": 0.1, "stat_interval": 2, "inverse_interval": 5}
FORM: dict[str, Any] = {"graft": "adam", "relative_damping": True}
SEED = 0
ROUNDINGS = ("nearest", "stochastic", "master")
# By name: the parameters' dtype, and the rounding.
PRECISIONS = {
    "float32": (torch.float32, "nearest"),
    **{f"bfloat16, {rounding}": (torch.bfloat16, rounding) for rounding in ROUNDINGS},
}


def _fallback(model: nn.Module, rounding: str) -> Any:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    main = TNT(matrices, rounding=rounding, **SETTINGS, **FORM)
    return with_fallback(main, torch.optim.AdamW(rest, lr=SETTINGS["lr"]))


OPTIMIZERS: dict[str, Callable[[nn.Module, str], Any]] = {
    "TNT": lambda model, rounding: TNT(
        model.parameters(), rounding=rounding, **SETTINGS, **FORM
    ),
    "TNT, empirical": lambda model, rounding: TNT(
        model.parameters(), fisher="empirical", rounding=rounding, **SETTINGS, **FORM
    ),
    "Shampoo": lambda model, rounding: Shampoo(
        model.parameters(), rounding=rounding, **SETTINGS, **FORM
    ),
    "KFAC": lambda model, rounding: KFAC(model, **SETTINGS),
    "TNT with AdamW": _fallback,
}  # fmt: skip
# KFAC rounds to nearest alone.
CASES = [
    (optimizer, precision)
    for optimizer in OPTIMIZERS
    for precision, (_, rounding) in PRECISIONS.items()
    if optimizer != "KFAC" or rounding == "nearest"
]


def compared(optimizer: str, precision: str, steps: int) -> dict[str, int]:
    """How many numbers differ after twice so many steps, where the second half was resumed.

    Args:
        optimizer: one of ``OPTIMIZERS``.
        precision: one of ``PRECISIONS``.
        steps: before the break, and after it.
    """
    dtype, rounding = PRECISIONS[precision]

    def made() -> tuple[nn.Module, Any]:
        model = Classifier(SEED).to(dtype)
        return model, OPTIMIZERS[optimizer](model, rounding)

    model, opt = made()
    train(model, opt, range(steps))
    saved = through_a_file({"model": model.state_dict(), "opt": opt.state_dict()})
    half_way = [p.detach().clone() for p in model.parameters()]
    train(model, opt, range(steps, 2 * steps))
    resumed, other = made()
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    train(resumed, other, range(steps, 2 * steps))
    params, state = list(model.parameters()), tensors(opt.state_dict()["state"])
    return {
        "parameters_differ": differing(list(resumed.parameters()), params),
        "of_parameters": sum(p.numel() for p in params),
        "state_differs": differing(tensors(other.state_dict()["state"]), state),
        "of_state": sum(t.numel() for t in state),
        "moved_since": differing(half_way, params),
    }


def train(model: nn.Module, opt: Any, steps: range) -> None:
    """Takes these steps."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        opt.zero_grad()
        x, y = batch(SEED, step)
        output = model(x.to(dtype))
        if not isinstance(opt, Shampoo):
            opt.observe(output)
        cross_entropy(output.float(), y).backward()
        opt.step()


def through_a_file(content: Any) -> Any:
    """What is read of it after it was written, by ``torch.load(weights_only=True)``."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def tensors(state: Any) -> list[Tensor]:
    """All of a state, and its numbers as tensors, in its order."""
    if isinstance(state, dict | list | tuple):
        inside = state.values() if isinstance(state, dict) else state
        return list(chain.from_iterable(map(tensors, inside)))
    if isinstance(state, bool | int | float):
        return [torch.tensor(state, dtype=torch.float64)]
    return [state] if isinstance(state, Tensor) else []
