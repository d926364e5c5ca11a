"""What KFAC survives, counts and reports, and what stops it."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import close
from test_kfac_observations import conv_net
from torch import Tensor, nn

from tnt_optim import KFAC, PreconditionerError
from tnt_optim.kfac.inverses import INVERSES

if TYPE_CHECKING:
    from conftest import Snapshot

    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")


NAN = math.nan


def test_step_before_any_statistic_says_what_to_do(snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = KFAC(model)
    model(torch.randn(8, 2, 4, 4).double()).sum().backward()
    before = snapshot(model.parameters(), opt)
    with pytest.raises(RuntimeError, match=r"layer '0'.*observe.*warm_start"):
        opt.step()
    before.assert_unchanged()


def test_forgotten_observe_warns_once_and_keeps_the_statistics() -> None:
    model = nn.Linear(3, 2).double()
    opt = KFAC(model, stat_interval=1)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    stats = [s.clone() for s in opt.state[model.weight]["stats"]]
    with pytest.warns(RuntimeWarning, match="observe") as said:
        opt.step()
    assert [warning.filename for warning in said] == [__file__]
    opt.step()  # a second warning would be an error
    assert all(
        torch.equal(a, b) for a, b in zip(stats, opt.state[model.weight]["stats"], strict=True)
    )


def train_linear(model: nn.Module, opt: KFAC, x: Tensor) -> None:
    """One step whose user gradient is finite whatever the input."""
    opt.zero_grad()
    opt.observe(model(x))
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    opt.step()


def test_what_is_not_finite_is_left_out_counted_and_stops_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    opt = KFAC(model, stat_interval=1, inverse_interval=1)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    stats = [s.clone() for state in opt._layer_states().values() for s in state["stats"]]
    bad = x.clone()
    bad[0, 0] = math.inf
    for _ in range(4):
        before = model[0].weight.detach().clone()
        with pytest.warns(RuntimeWarning, match=r"not finite.*layer '0'.*1 other"):
            train_linear(model, opt, bad)
        assert not torch.equal(before, model[0].weight) and bool(model[0].weight.isfinite().all())
    held = [s for state in opt._layer_states().values() for s in state["stats"]]
    assert all(torch.equal(a, b) for a, b in zip(stats, held, strict=True))
    with pytest.raises(PreconditionerError, match="5 in a row"):
        train_linear(model, opt, bad)
    assert opt.failures() == {"skipped_statistics": 5, "failed_inverses": 0}
    train_linear(model, opt, x)
    assert opt.state[model[0].weight]["skipped_in_a_row"] == 0


def test_first_statistics_that_are_not_finite_raise(snapshot: "TakeSnapshot") -> None:
    model = nn.Linear(3, 2).double()
    opt = KFAC(model)
    before = [p.detach().clone() for p in model.parameters()]
    bad = torch.full((5, 3), NAN).double()
    with pytest.raises(PreconditionerError, match="first inputs or gradients"):
        train_linear(model, opt, bad)
    with pytest.raises(PreconditionerError, match="none of 2 batches"):
        opt.warm_start(model(bad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not opt.state_dict()["state"]
    opt.warm_start(model(x) for x in (torch.randn(5, 3).double(), bad))
    assert opt.failures()["skipped_statistics"] == 1
    train_linear(model, opt, torch.randn(5, 3).double())


class Beside(nn.Module):
    """Two layers, each on an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(N, 3) and (N, 2) to (N, 5)."""
        return torch.cat([self.left(x), self.right(y)], dim=1)


def beside(**settings: Any) -> tuple[Beside, KFAC, Callable[[Tensor, Tensor], None]]:
    """Such layers, and a step on such inputs, with finite gradients whatever these are."""
    model = Beside().double()

    def likelihood(output: Tensor) -> Tensor:
        weights = torch.randn(output.shape, dtype=output.dtype)
        return (output * weights).sum() / len(output)

    opt = KFAC(model, likelihood=likelihood, stat_interval=1, inverse_interval=1, **settings)

    def step(x: Tensor, y: Tensor) -> None:
        opt.observe(model(x, y))
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        opt.step()

    return model, opt, step


def test_first_statistics_that_are_not_finite_are_named() -> None:
    x, y = torch.randn(5, 3).double(), torch.full((5, 2), math.inf).double()
    _, opt, step = beside()
    with pytest.raises(PreconditionerError, match="go on with, for layer 'right'"):
        step(x, y)
    assert not opt.state_dict()["state"]


def test_newcomer_joins_where_others_are_not_finite() -> None:
    x, y = torch.full((5, 3), NAN).double(), torch.randn(5, 2).double()
    model, opt, step = beside()
    model.right.requires_grad_(False)
    step(torch.randn(5, 3).double(), y)
    held = [s.clone() for s in opt.state[model.left.weight]["stats"]]
    model.right.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="not finite; left out of those of layer 'left'"):
        step(x, y)
    assert all(map(torch.equal, held, opt.state[model.left.weight]["stats"]))
    rows = torch.cat([y, torch.ones(5, 1)], 1)
    close(opt.state[model.right.weight]["stats"][1], rows.T @ rows / 5)
    assert opt.failures() == {"skipped_statistics": 1, "failed_inverses": 0}


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_skipped_steps_observation_that_is_not_finite_is_left_out(place: int, bad: float) -> None:
    """As GradScaler skips a step on an overflow: nothing but observations has happened."""
    outputs = [torch.randn(n, 3).double() for n in (4, 5, 6)]
    model = nn.Linear(3, 2).double()
    likelihood = nn.Linear(2, 1).double().requires_grad_(False)  # the same for every example

    def statistics(inputs: list[Tensor]) -> list[Tensor]:
        opt = KFAC(model, lr=0.0, likelihood=lambda z: likelihood(z).mean())
        for i, x in enumerate(inputs):
            opt.observe(model(x))
            if i == 0:
                opt.step()  # with no gradient: brings the first statistics
                opt.param_groups[0]["step"] = 0
                continue
        opt.step()
        assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
        return opt.state[model.weight]["stats"]

    expected = statistics(outputs)
    spoiled = torch.full((3, 3), bad).double()
    later = outputs[1:]
    later.insert(place, spoiled)
    actual = statistics([outputs[0], *later])
    assert all(map(torch.equal, actual, expected))
    rows = [torch.cat([x, torch.ones(len(x), 1)], 1) for x in outputs]
    mean = (rows[1].T @ rows[1] + rows[2].T @ rows[2]) / 11
    close(expected[1], 0.9 * rows[0].T @ rows[0] / 4 + 0.1 * mean)


def test_observations_none_of_which_is_finite_are_counted() -> None:
    _, opt, step = beside()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    step(x, y)
    opt.observe(opt._model(x * NAN, y))
    with pytest.warns(RuntimeWarning, match="layer 'left'.* other"):
        step(x * math.inf, y)
    assert opt.failures() == {"skipped_statistics": 1, "failed_inverses": 0}


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_singular_matrices_without_damping(inverse: str) -> None:
    """At first there is nothing to go on with; later the old inverses stay."""
    model = nn.Linear(3, 2).double()  # categorical: the rows of g sum to zero
    with pytest.raises(PreconditionerError, match=r"^gradient factor G of layer.*damping is 0.0"):
        train_linear(model, KFAC(model, damping=0.0, inverse=inverse), torch.randn(5, 3).double())
    opt = KFAC(model, inverse=inverse, stat_interval=1, inverse_interval=1)
    train_linear(model, opt, torch.randn(5, 3).double())
    factors = [f.clone() for f in opt.state[model.weight]["factors"]]
    opt.param_groups[0]["damping"] = 0.0
    with pytest.warns(RuntimeWarning, match="^gradient factor G could not be inverted"):
        train_linear(model, opt, torch.randn(5, 3).double())
    kept = zip(factors, opt.state[model.weight]["factors"], strict=True)
    same = [torch.equal(a, b) for a, b in kept]
    assert same == ([True, False] if inverse == "damped" else [True, True, True])
    assert opt.failures()["failed_inverses"] == 1


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_singular_inputs_without_damping(inverse: str) -> None:
    """Fewer examples than inputs, and a G of full rank."""
    model = nn.Linear(7, 2, bias=False).double()
    opt = KFAC(model, damping=0.0, inverse=inverse, likelihood="gaussian")
    x = torch.zeros(5, 7).double()
    x[:, :5] = torch.randn(5, 5)
    with pytest.raises(PreconditionerError, match=r"^input factor A of layer.*damping is 0.0"):
        train_linear(model, opt, x)


@pytest.mark.parametrize(
    ("g", "a", "damping", "code"),
    [
        (1e-16, 1.0, 0.0, 1),
        (1.0, 1e-16, 0.0, 2),
        (1e-14, 1e-14, 0.0, 0),
        (1e-16, 1e-16, 1e-20, 0),
        (0.0, -1e-16, 1e-20, 0),
        (NAN, 1e-16, 0.0, 1),
        (1e-16, NAN, 1.0, 2),
    ],
)
def test_what_is_singular_to_working_precision(
    g: float, a: float, damping: float, code: int
) -> None:
    """Of two eigenvalues the larger is 1; only without damping does the other one matter."""
    pair = [torch.diag(torch.tensor([1.0, least], dtype=torch.float64)) for least in (g, a)]
    (factors,), codes = INVERSES["eigenbasis"].make([pair], damping, None)
    assert codes.tolist() == [code]
    if code == 0:
        left, right = (torch.tensor([max(x, 0.0), 1.0], dtype=torch.float64) for x in (g, a))
        products = torch.outer(left, right) + damping
        close(factors[2] * products, torch.ones(2, 2).double())


@pytest.mark.parametrize(
    ("failing", "part"), [((2, 3), "gradient factor G"), ((4,), "input factor A")]
)
def test_eigenvalues_that_do_not_come_keep_the_old_ones(
    failing: tuple[int, ...], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    sound = torch.linalg.eigh
    opt = KFAC(model, inverse="eigenbasis", stat_interval=1)
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    factors = [f.clone() for s in opt._layer_states().values() for f in s["factors"]]

    def eigh(matrix: Tensor) -> Any:
        if len(matrix) in failing:
            raise torch.linalg.LinAlgError("no convergence")
        return sound(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    with pytest.warns(RuntimeWarning, match=f"{part}.*1 other"):
        train_linear(model, opt, x)
    held = [f for s in opt._layer_states().values() for f in s["factors"]]
    assert all(torch.equal(a, b) for a, b in zip(factors, held, strict=True))
    with pytest.raises(PreconditionerError, match=part):
        train_linear(model, KFAC(model, inverse="eigenbasis"), x)


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_zero_gradients_give_a_multiple_of_the_identity(inverse: str) -> None:
    """G = 0: (√λ I)^-1 M (A + √λ I)^-1, or M / λ in the eigenbasis."""
    model, damping = nn.Linear(3, 2).double(), 0.25
    start = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    opt = KFAC(model, lr=0.5, damping=damping, inverse=inverse, likelihood=lambda z: (0 * z).sum())
    x = torch.randn(5, 3).double()
    train_linear(model, opt, x)
    rows = torch.cat([x, torch.ones(5, 1)], 1)
    a = rows.T @ rows / 5 + 0.5 * torch.eye(4)
    wanted = torch.ones(2, 4).double() / damping
    if inverse == "damped":
        wanted = torch.ones(2, 4).double() @ torch.linalg.inv(a) / 0.5
    moved = start - torch.cat([model.weight, model.bias[:, None]], 1).detach()
    close(moved, 0.5 * wanted)


def test_statistics_and_inverses_are_symmetric_to_the_bit() -> None:
    model = nn.Sequential(nn.Conv2d(3, 65, 3), nn.Flatten(), nn.Linear(65 * 4, 9))
    opt = KFAC(model, stat_interval=1, inverse_interval=1)
    for _ in range(3):
        train_linear(model, opt, torch.randn(5, 3, 4, 4))
    for state in opt._layer_states().values():
        for matrix in state["stats"] + state["factors"]:
            assert matrix.dtype == torch.float32
            assert torch.equal(matrix, matrix.T)
