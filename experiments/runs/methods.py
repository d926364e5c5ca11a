"""The optimizers that are compared, and how each is made from a run's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from experiments.runs.first_order import DecoupledSGD, MuonWithAdamW
from experiments.runs.settings import Settings
from tnt_optim import KFAC, TNT, Shampoo


@dataclass(frozen=True)
class Method:
    """One optimizer of the comparison.

    Attributes:
        label: its name in tables and legends, as in the paper.
        colour: of its curves; Okabe and Ito's palette, told apart in grey and by colour-blind
            readers too.
        statistics: where its curvature comes from: labels "sampled" from the model's own
            distribution, the "empirical" training gradients, or None for a first-order method.
        damped: whether it has a damping (for Adam its epsilon).
        stat_decay: the decay of its moving average (beta in the paper; Adam's beta_2), as the paper
            sets it; None where it has no such average.
        build: makes it: from the model, the settings and the likelihood of the model's output.
    """

    label: str
    colour: str
    statistics: Literal["sampled", "empirical"] | None
    damped: bool
    stat_decay: float | None
    build: Callable[[nn.Module, Settings, str], torch.optim.Optimizer]


def _tnt(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    return TNT(
        model.named_parameters(),  # with the names, so that warnings have them
        likelihood=likelihood,
        fisher="empirical" if settings.optimizer == "tnt-ef" else "sampled",
        seed=settings.seed,
        relative_damping=bool(settings.relative_damping),
        graft=settings.graft,
        **_second_order(settings),
    )


def _shampoo(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    return Shampoo(
        model.named_parameters(),
        relative_damping=bool(settings.relative_damping),
        graft=settings.graft,
        **_second_order(settings),
    )


def _kfac(inverse: str) -> Callable[[nn.Module, Settings, str], torch.optim.Optimizer]:
    def build(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
        return KFAC(
            model,
            likelihood=likelihood,
            inverse=inverse,
            seed=settings.seed,
            **_second_order(settings),
        )

    return build


def _adam(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    assert settings.stat_decay is not None and settings.damping is not None
    # AdamW without decay is Adam.
    return torch.optim.AdamW(
        model.named_parameters(),
        lr=settings.lr,
        betas=(settings.momentum, settings.stat_decay),
        eps=settings.damping,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _sgd(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    return DecoupledSGD(
        model.named_parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


def _muon(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    return MuonWithAdamW(
        model, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def _second_order(settings: Settings) -> dict[str, Any]:
    return {
        "lr": settings.lr,
        "damping": settings.damping,
        "momentum": settings.momentum,
        "stat_decay": settings.stat_decay,
        "weight_decay": settings.weight_decay,
        "stat_interval": settings.stat_interval,
        "inverse_interval": settings.inverse_interval,
    }


METHODS: dict[str, Method] = {
    "tnt": Method("TNT", "#0072B2", "sampled", True, 0.9, _tnt),
    "tnt-ef": Method("TNT-EF", "#56B4E9", "empirical", True, 0.9, _tnt),
    # Which form of KFAC is a matter of the problem: the paper inverts damped factors for the
    # autoencoders and works in the eigenbasis for the convolutional networks.
    "kfac": Method("KFAC", "#CC79A7", "sampled", True, 0.9, _kfac("damped")),
    "kfac-eigen": Method("KFAC (eigenbasis)", "#AA4499", "sampled", True, 0.9, _kfac("eigenbasis")),
    "shampoo": Method("Shampoo", "#E69F00", "empirical", True, 0.9, _shampoo),
    "adam": Method("Adam", "#009E73", None, True, 0.999, _adam),
    "sgd": Method("SGD-m", "#D55E00", None, False, None, _sgd),
    "muon": Method("Muon + AdamW", "#000000", None, False, None, _muon),
}
LABELS = {name: method.label for name, method in METHODS.items()}


def has_statistics(optimizer: str) -> bool:
    """Whether the optimizer is second-order: with statistics, inverses and a warm start."""
    return METHODS[optimizer].statistics is not None


def takes_graft(optimizer: str) -> bool:
    """Whether the optimizer has `graft` and `relative_damping`."""
    return optimizer in ("tnt", "tnt-ef", "shampoo")


def build_optimizer(model: nn.Module, settings: Settings, likelihood: str) -> torch.optim.Optimizer:
    """The optimizer that `settings` name, over all parameters of `model`.

    Raises:
        ValueError: there is no such method; the message lists those there are.
    """
    if settings.optimizer not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"optimizer must be one of {known}, got {settings.optimizer!r}")
    return METHODS[settings.optimizer].build(model, settings, likelihood)
