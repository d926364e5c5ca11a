"""A physics-informed network: the Poisson equation on the unit square, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.problems.problem import Endless

# Steps between two measurements of the error.
EPOCH_STEPS = 50
# The share of a batch's points that are on the boundary, and the factor of their residuals: without
# it the second derivatives, which are some ten times as large as u, outweigh them.
BOUNDARY_SHARE, BOUNDARY_FACTOR = 0.2, 10.0
# Points of the error's grid in each direction.
GRID = 64


class PoissonNetwork(nn.Module):
    """A perceptron u(x, y), whose forward pass returns the residuals of -Δu = f with u = g.

    Args:
        width: of the hidden layers.
        layers: how many hidden layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [2, *[width] * layers]
        hidden = [
            part
            for before, after in zip(sizes, sizes[1:], strict=False)
            for part in (nn.Linear(before, after), nn.Tanh())
        ]
        self.u = nn.Sequential(*hidden, nn.Linear(width, 1)).double()

    def forward(self, points: Tensor) -> Tensor:
        """The residual of each point: of the equation inside, of the value on the boundary.

        Args:
            points: (N, 2), float64; a coordinate of 0 or 1 is on the boundary.

        Returns:
            (N, 1). Boundary residuals are multiplied by `BOUNDARY_FACTOR`.
        """
        edge = ((points == 0) | (points == 1)).any(dim=1)
        border, inside = points[edge], points[~edge].requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.u(inside).sum(), inside, create_graph=True)
            second = [
                torch.autograd.grad(part.sum(), inside, create_graph=True)[0][:, i]
                for i, part in enumerate(slope.unbind(1))
            ]
        equation = -(second[0] + second[1]) - source(inside.detach())
        value = BOUNDARY_FACTOR * (self.u(border).squeeze(1) - solution(border))
        return torch.cat([equation, value]).unsqueeze(1)


def solution(points: Tensor) -> Tensor:
    """u = sin(πx) sin(πy) + sin(4πx) sin(2πy) / 2, (N,)."""
    x, y = (math.pi * points).unbind(1)
    return x.sin() * y.sin() + 0.5 * (4 * x).sin() * (2 * y).sin()


def source(points: Tensor) -> Tensor:
    """f = -Δu of `solution`, (N,)."""
    x, y = (math.pi * points).unbind(1)
    return math.pi**2 * (2 * x.sin() * y.sin() + 10 * (4 * x).sin() * (2 * y).sin())


class Poisson(Endless):
    """-Δu = f on the unit square, u given on its boundary; each step draws its points anew.

    The residuals are the outputs, with a normal distribution: its Fisher matrix is the Gauss-Newton
    matrix of the loss, their mean square. An "epoch" is a fixed number of steps.

    Args:
        width: of the hidden layers.
        layers: how many.
        epoch_steps: steps in an epoch.
    """

    name = "poisson"
    likelihood = "gaussian"
    loss_label = "mean squared residual"
    examples = 1 << 20  # points are never the same: a bound of the batch size only

    def __init__(self, width: int = 64, layers: int = 3, epoch_steps: int = EPOCH_STEPS) -> None:
        self.width, self.layers, self.epoch_steps = width, layers, epoch_steps
        self.label = f"Poisson equation, {layers} layers of width {width}"
        side = torch.linspace(0, 1, GRID, dtype=torch.float64)
        self.grid = torch.cartesian_prod(side, side)

    def build(self) -> nn.Module:
        """The perceptron with the residuals as outputs."""
        return PoissonNetwork(self.width, self.layers)

    def batch(self, indices: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """Uniform points, (N, 2), the last fifth on the boundary; and the residuals' target, 0."""
        count, device = len(indices), indices.device
        points = torch.rand(count, 2, dtype=torch.float64, generator=augment, device=device)
        edge = round(BOUNDARY_SHARE * count)
        places = torch.arange(count - edge, count, device=device)
        axes, sides = torch.randint(2, (2, edge), generator=augment, device=device)
        points[places, axes] = sides.double()
        return points, points.new_zeros(count, 1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared residual."""
        return functional.mse_loss(outputs, targets)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The relative error of u on a grid, in the 2-norm."""
        exact = solution(self.grid)
        error = model.get_submodule("u")(self.grid).squeeze(1) - exact
        return {"relative_error": float(error.norm() / exact.norm())}

    def description(self) -> dict[str, Any]:
        """Equation, network and points."""
        return {
            "problem": self.name,
            "width": self.width,
            "layers": self.layers,
            "epoch_steps": self.epoch_steps,
            "boundary": [BOUNDARY_SHARE, BOUNDARY_FACTOR],
            "grid": GRID,
        }
