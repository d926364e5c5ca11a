"""Training in each precision, from the same starts on the same batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

from bench.precision.bits import differing
from bench.precision.digits import Classifier, batch, data
from tnt_optim import TNT

# From the first step's learning rate to the last one's, by equal factors. A grafted step moves a
# number by about the learning rate: at the end by less than half a spacing of bfloat16 at 0.1,
# which is 2**-12.
FIRST_LR, LAST_LR = 5e-2, 1e-4
SETTINGS: dict[str, Any] = {
    "damping": 0.1,
    "graft": "adam",
    "relative_damping": True,
    "stat_interval": 2,
    "inverse_interval": 10,
}


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        parameters: their dtype.
        rounding: TNT's.
        autocast: the dtype of the forward; None for the parameters'.
    """

    parameters: torch.dtype
    rounding: str = "nearest"
    autocast: torch.dtype | None = None


WAYS = {
    "float32": Way(torch.float32),
    "bfloat16, nearest": Way(torch.bfloat16),
    "bfloat16, stochastic": Way(torch.bfloat16, "stochastic"),
    "bfloat16, master": Way(torch.bfloat16, "master"),
    "float32, autocast bfloat16": Way(torch.float32, autocast=torch.bfloat16),
    "float32, autocast float16, GradScaler": Way(torch.float32, autocast=torch.float16),
}


def trained(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Where a training ends: its loss and errors, of the parameters alone, computed in float32."""
    way = WAYS[name]
    model = Classifier(seed).to(way.parameters)
    opt = TNT(model.parameters(), lr=FIRST_LR, rounding=way.rounding, seed=seed, **SETTINGS)
    schedule = ExponentialLR(opt, (LAST_LR / FIRST_LR) ** (1 / max(1, steps - 1)))
    scaler = torch.amp.GradScaler("cpu", enabled=way.autocast is torch.float16)
    before: list[Tensor] = []
    for step in range(steps):
        opt.zero_grad()
        x, y = batch(seed, step)
        with torch.autocast("cpu", way.autocast or torch.bfloat16, way.autocast is not None):
            output = model(x.to(way.parameters))
        opt.observe(output)
        scaler.scale(cross_entropy(output.float(), y)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(opt)
        scaler.update()
        schedule.step()
    moved = differing(before, list(model.parameters()))
    return {
        **_ends(model),
        "last_step_moved": moved / sum(p.numel() for p in model.parameters()),
        "steps_taken": opt.param_groups[0]["step"],
        "failures": opt.failures(),
    }


@torch.no_grad()
def _ends(model: nn.Module) -> dict[str, float]:
    model = copy.deepcopy(model).float()
    images, labels, held, held_labels = data()
    return {
        "training_loss": float(cross_entropy(model(images), labels)),
        "validation_error": float((model(held).argmax(1) != held_labels).double().mean()),
    }
