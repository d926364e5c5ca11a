"""States in files of earlier commits load, and training goes on as it did then.

``python tests/optim/test_saved_states.py`` writes the files that are missing; the files that are
there stay as they are. Each has the state after 7 steps, and the weights after 5 more.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import KFAC, TNT, Shampoo, with_fallback

FOLDER = Path(__file__).with_name("saved_states")
SAVED_AFTER, MORE = 7, 5
Model = nn.Sequential
SHORT: dict[str, Any] = {"stat_interval": 2, "inverse_interval": 3, "interval_warmup": 0}


def model() -> Model:
    torch.manual_seed(0)
    return Model(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5))


def split(m: Model) -> Any:
    vectors = [p for p in m.parameters() if p.dim() == 1]
    matrices = [p for p in m.parameters() if p.dim() > 1]
    return with_fallback(TNT(matrices, **SHORT), torch.optim.AdamW(vectors, lr=1e-3))


def of(kind: Any, **settings: Any) -> Callable[[Model], Any]:
    return lambda m: kind(m.parameters(), **{**SHORT, **settings})


MADE: dict[str, Callable[[Model], Any]] = {
    "tnt": of(TNT),
    "tnt-defaults": lambda m: TNT(m.named_parameters()),
    "tnt-sampled": of(TNT, likelihood="categorical", seed=3),
    "tnt-sampled-sgd": of(TNT, likelihood="categorical", graft="sgd"),
    "tnt-rms": of(TNT, graft="rms"),
    "tnt-blocks": of(TNT, block_size=4, precondition_1d=True),
    "tnt-diagonal": of(TNT, max_factor_dim=4),
    "tnt-stochastic": of(TNT, rounding="stochastic"),
    "tnt-nearest": of(TNT, rounding="nearest"),
    "tnt-master": of(TNT, rounding="master"),
    "tnt-paper": lambda m: TNT.paper(
        m.parameters(), likelihood="categorical", lr=1e-3, damping=0.1, stat_interval=2
    ),
    "shampoo": of(Shampoo),
    "shampoo-paper": lambda m: Shampoo.paper(m.parameters(), lr=1e-2, inverse_interval=3),
    "kfac": lambda m: KFAC(m, likelihood="categorical", **SHORT),
    "kfac-eigenbasis": lambda m: KFAC(m, likelihood="categorical", inverse="eigenbasis", **SHORT),
    "fallback": split,
}
# With the moments of weight and bias apart, and a graft of its own for each.
APART = {f"{name}-apart": MADE[name] for name in ("kfac", "kfac-eigenbasis")}
HALF = ("tnt-stochastic", "tnt-nearest", "tnt-master")


def ready(name: str) -> tuple[Model, Any]:
    trained = model().to(torch.bfloat16 if name in HALF else torch.float32)
    return trained, (MADE | APART)[name](trained)


def train(m: Model, opt: Any, steps: range) -> None:
    dtype = next(m.parameters()).dtype
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(20, 2, 4, 4, generator=draw).to(dtype)
        y = torch.randint(5, (20,), generator=draw)
        opt.zero_grad()
        out = m(x)
        opt.observe(out)
        cross_entropy(out, y).backward()
        opt.step()


def weights(m: Model) -> list[Tensor]:
    return [p.detach().clone() for p in m.parameters()]


def write(name: str) -> None:
    m, opt = ready(name)
    train(m, opt, range(SAVED_AFTER))
    saved = {"model": m.state_dict(), "optimizer": opt.state_dict()}
    path = FOLDER / f"{name}.pt"
    torch.save(saved, path)  # before the next steps change it
    train(m, opt, range(SAVED_AFTER, SAVED_AFTER + MORE))
    torch.save({**torch.load(path), "then": weights(m)}, path)


def test_every_state_has_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.pt")} == {*MADE, *APART, "kfac-outside-layers"}


def continued(name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each parameter its end now, its end then, and its start, of the steps after a file."""
    saved = torch.load(FOLDER / f"{name}.pt")
    m, opt = ready(name)
    m.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    before = weights(m)
    train(m, opt, range(SAVED_AFTER, SAVED_AFTER + MORE))
    return zip(weights(m), saved["then"], before, strict=True)


@pytest.mark.parametrize("name", MADE)
def test_a_saved_training_goes_on(name: str) -> None:
    # Other processors round otherwise; bfloat16 has 8 bits.
    close = functools.partial(torch.testing.assert_close, **tolerance(name))
    for own, then, start in continued(name):
        close(own, then)
        with pytest.raises(AssertionError):  # the steps are larger than the tolerance
            close(own, start)


@pytest.mark.parametrize("name", APART)
def test_moments_of_weight_and_bias_apart_are_joined(name: str) -> None:
    """Weights move by 0.2 to 4 % more or less than then; a bias, up to half: it had its graft."""
    for own, then, start in continued(name):
        assert (own - then).norm() <= (0.05 if own.dim() > 1 else 0.6) * (then - start).norm()


class Outside(nn.Module):
    """Parameters of no, one, two and three dimensions outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 4, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.deep = nn.Conv1d(4, 4, 3, groups=4, padding=1)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4, 4) to (N, 3)."""
        return self.out(self.deep((x + self.place) * self.scale).tanh().flatten(1))


@pytest.mark.filterwarnings("ignore:KFAC updates:RuntimeWarning")
@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_parameters_outside_of_layers(inverse: Any) -> None:
    """Of an earlier state, with the moments in their own shapes; the eigenbasis has none."""
    saved = torch.load(FOLDER / "kfac-outside-layers.pt")
    m = Outside()
    opt = KFAC(m, likelihood="categorical", inverse=inverse, **SHORT)
    if inverse == "damped":
        m.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        assert torch.equal(
            opt.state[m.deep.weight]["momentum"].flatten(),
            saved["optimizer"]["state"][2]["momentum"].flatten(),
        )
    before = weights(m)  # type: ignore[arg-type]
    for _ in range(3):
        opt.zero_grad()
        out = m(torch.randn(6, 4, 4))
        opt.observe(out)
        cross_entropy(out, torch.arange(6) % 3).backward()
        opt.step()
    after = weights(m)  # type: ignore[arg-type]
    assert not any(map(torch.equal, before, after))


def tolerance(name: str) -> dict[str, float]:
    return {"rtol": 0.02, "atol": 1e-3} if name in HALF else {"rtol": 1e-4, "atol": 1e-5}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for missing in [name for name in MADE if not (FOLDER / f"{name}.pt").exists()]:
        write(missing)
        print(missing, file=sys.stderr)
