"""The sampled pass in float16: statistics beside those of float32 at the same sampled labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tnt_optim import TNT, PreconditionerError

WIDTH = 64
# Of the head's weights, as in GPT-2.
HEAD_DEVIATION = 0.02
# By name: what TNT is given as sample_scale.
SCALES: dict[str, float | None] = {"1": 1.0, "default": None}


def measured(classes: int, rows: int) -> dict[str, Any]:
    """What statistics under autocast are of those in float32, by scale and parameter.

    Labels are drawn at logits of the same values, so that they are the same, and so are the
    gradients by logits but for their rounding.
    """
    model, x = _model(classes), _inputs(rows)
    with torch.autocast("cpu", torch.float16):
        half = model(x)
    full = model(x)
    # Float16's values, float32's graph.
    wanted = _traces(model, full - full.detach() + half.detach().float(), None)
    ratios: dict[str, Any] = {}
    for name, scale in SCALES.items():
        with torch.autocast("cpu", torch.float16):
            half = model(x)
        try:
            found = _traces(model, half, scale)
        except PreconditionerError as error:
            ratios[name] = str(error)
            continue
        ratios[name] = {p: found[p] / wanted[p] for p in wanted}
    return {"ratios": ratios}


def _model(classes: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes)
        nn.init.normal_(head.weight, std=HEAD_DEVIATION)
        model = nn.Sequential(body, nn.Tanh(), head)
    return model.half().float()  # autocast has nothing to round


def _inputs(rows: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(rows, WIDTH, generator=rng).half().float()


def _traces(model: nn.Module, output: Tensor, scale: float | None) -> dict[str, float]:
    """Of every parameter's first statistics; those of all its modes are the same."""
    opt = TNT(model.parameters(), lr=0.0, sample_scale=scale, relative_damping=True)
    opt.observe(output)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt.step()
    return {
        name: float(opt.state[param]["stats"][0].double().trace())
        for name, param in model.named_parameters()
    }
