"""A physics-informed network: the Poisson equation -Δu = f on the unit square, u = 0 at its edge.

Needs nothing but this package; run ``python examples/poisson.py`` (half a minute on a CPU). The
residuals are observed with a normal distribution: the statistics are then those of the Gauss-Newton
matrix of their squares. Such problems are badly conditioned: use float64, less damping and a larger
rate than by default, and let the rate decay.
"""

import math

import torch
from torch import Tensor, nn

from tnt_optim import TNT


def exact(points: Tensor) -> Tensor:
    """u = sin(πx) sin(2πy), (N,)."""
    x, y = (math.pi * points).unbind(1)
    return x.sin() * (2 * y).sin()


def residuals(u: nn.Module, inside: Tensor, edge: Tensor) -> Tensor:
    """Δu + f at each point inside, and 10 u at each point of the edge, (N, 1)."""
    inside = inside.requires_grad_()
    (slope,) = torch.autograd.grad(u(inside).sum(), inside, create_graph=True)
    laplacian = sum(
        torch.autograd.grad(part.sum(), inside, create_graph=True)[0][:, i]
        for i, part in enumerate(slope.unbind(1))
    )
    f = 5 * math.pi**2 * exact(inside.detach())
    return torch.cat([laplacian + f, 10 * u(edge)[:, 0]])[:, None]


def main(steps: int = 1000) -> tuple[list[float], TNT]:
    """Trains for ``steps`` steps; returns their losses and the optimizer."""
    torch.manual_seed(0)
    sizes = [2, 64, 64, 64]
    pairs = zip(sizes, sizes[1:], strict=False)
    hidden = [part for pair in pairs for part in (nn.Linear(*pair), nn.Tanh())]
    u = nn.Sequential(*hidden, nn.Linear(64, 1)).double()

    opt = TNT(u.parameters(), lr=0.03, damping=0.003, likelihood="gaussian")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    losses = []
    for _ in range(steps):
        inside, edge = torch.rand(2, 400, 2, dtype=torch.float64)
        edge = edge[:100]
        edge[torch.arange(100), torch.randint(2, (100,))] = torch.randint(2, (100,)).double()
        opt.zero_grad()
        r = residuals(u, inside, edge)
        opt.observe(r)
        loss = r.square().mean()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())

    side = torch.linspace(0, 1, 64, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        error = (u(grid)[:, 0] - exact(grid)).norm() / exact(grid).norm()
    print(f"after {steps} steps: relative error {error:.1e}")
    return losses, opt


if __name__ == "__main__":
    main()
