"""What a soak trains: a small classifier of the digits, whose steps depend on their number alone.

A batch, and the labels of the sampled loss, are functions of the step's number; so is every
numerical fault but for what share of a batch one process has. A process that trains alone can
therefore repeat what any number of processes have done, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.soak.plan import Schedule
from tnt_optim import TNT

BATCH = 64  # divisible by every number of processes
SCHEDULE = Schedule(statistics=2, factors=10, checkpoints=25)
SETTINGS: dict[str, Any] = {
    "lr": 0.003,
    "damping": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "stat_interval": SCHEDULE.statistics,
    "inverse_interval": SCHEDULE.factors,
}
SIZES = (64, 32, 16, 10)


class Training:
    """A model, its optimizer and its data.

    Args:
        data: a file that ``write_data`` has written.
        seed: of the model's start and of all batches.
        shard: TNT's setting.
    """

    def __init__(self, data: Path, seed: int, shard: str | None = None) -> None:
        self.images, self.labels = torch.load(data, weights_only=True)
        self.seed = seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for wide, narrow in zip(SIZES, SIZES[1:], strict=False):
                layers += [nn.Linear(wide, narrow), nn.Tanh()]
            self.net = nn.Sequential(*layers[:-1]).double()
        self.model: nn.Module = self.net
        self.spoiled = False
        self.opt = TNT(self.net.parameters(), likelihood=self._likelihood, shard=shard, **SETTINGS)

    def step(
        self,
        step: int,
        rows: Sequence[int],
        *,
        observed: Sequence[int] | None = None,
        spoiled: bool = False,
        negative: float | None = None,
    ) -> None:
        """Takes one step.

        Args:
            step: its number, from 0.
            rows: those of the batch that the loss is of.
            observed: those that the statistics are of; None for the same.
            spoiled: whether the sampled gradient is NaN.
            negative: in [0, 1), of the parameters: whose statistics become negative.
        """
        self.spoiled = spoiled
        images, labels = self._batch(step)
        self.opt.zero_grad()
        output = self.model(images[rows])
        self.opt.observe(output if observed is None else self.net(images[observed]))
        loss: Tensor = cross_entropy(output, labels[rows])
        loss.backward()
        held = self._make_negative(negative)
        self.opt.step()
        with torch.no_grad():
            for stat, value in held:
                stat.copy_(value)

    def parameters(self) -> list[Tensor]:
        """Copies of the parameters."""
        return [p.detach().clone() for p in self.net.parameters()]

    def loss(self) -> float:
        """Over all digits."""
        with torch.no_grad():
            return float(cross_entropy(self.net(self.images), self.labels))

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        chosen = torch.randint(len(self.images), (BATCH,), generator=rng)
        return self.images[chosen], self.labels[chosen]

    def _likelihood(self, output: Tensor) -> Tensor:
        """Samples nothing: the loss at the least likely labels."""
        loss = cross_entropy(output, output.detach().argmin(1))
        return loss * math.nan if self.spoiled else loss

    def _make_negative(self, which: float | None) -> Sequence[tuple[Tensor, Tensor]]:
        """Makes a parameter's statistics so, those that are here; returns what they were."""
        if which is None:
            return []
        params = list(self.net.parameters())
        stats = self.opt.state[params[int(which * len(params))]].get("stats", [])
        held = [(stat, stat.clone()) for stat in stats]
        for stat in stats:
            stat.copy_(-1e6 * torch.eye(len(stat), dtype=stat.dtype))
        return held


def part(place: int, places: int) -> list[int]:
    """The rows of a batch that are one process's."""
    return list(range(place * BATCH // places, (place + 1) * BATCH // places))


def rest(place: int, places: int) -> list[int]:
    """The rows of a batch that are the other processes'."""
    own = part(place, places)
    return [row for row in range(BATCH) if row not in own]


def write_data(path: Path) -> None:
    """Writes scikit-learn's digits and their labels, in float64."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.data).to(torch.float64).div_(16.0)
    torch.save([images, torch.from_numpy(digits.target).to(torch.int64)], path)
