"""KFAC's two forms of the inverse: against dense solves, and if a matrix is singular."""

import math
from typing import Any

import pytest
import torch
from drawn import close, noise
from kfac_models import held, step_on_ones
from optimizers import equal
from oracle import dense_kron
from tolerances import FLOAT32_FORMULA, inverse_rounding
from torch import Tensor, nn

from tnt_optim import KFAC, PreconditionerError
from tnt_optim.kfac.inverses import eigenbasis, rotated
from tnt_optim.units import Units

NAN = math.nan
inverses = pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])


def solved(
    inverse: str, g: Tensor, a: Tensor, damping: float, matrix: Tensor, relative: bool = False
) -> Tensor:
    """The dense inverse applied to a matrix; ``relative`` to the factors' average eigenvalues."""
    eye_g, eye_a = torch.eye(len(g), dtype=g.dtype), torch.eye(len(a), dtype=a.dtype)
    if relative:
        eye_g, eye_a = eye_g * g.trace() / len(g), eye_a * a.trace() / len(a)
    if inverse == "damped":
        root = math.sqrt(damping)
        fisher = dense_kron([g + root * eye_g, a + root * eye_a])
    else:
        fisher = dense_kron([g, a]) + damping * dense_kron([eye_g, eye_a])
    return torch.linalg.solve(fisher, matrix.reshape(-1)).reshape(matrix.shape)


def test_small_eigenvalues_of_a_large_matrix_count() -> None:
    """In float32, with a tenth of them below n eps of the largest."""
    n, damping = 300, 1e-5
    basis = torch.linalg.qr(noise(n, n))[0]
    g = (basis * torch.logspace(0, -5, n, dtype=torch.float64)) @ basis.T
    g = ((g + g.T) / 2).float()
    a = torch.tensor([[1.0, 0.2, 0.0], [0.2, 0.5, 0.1], [0.0, 0.1, 0.7]])
    matrix = torch.randn(n, 3)
    factors = [torch.zeros(n, n), torch.zeros(3, 3), torch.zeros(n, 3)]
    codes = eigenbasis([[g, a]], damping, False, [factors])
    actual = rotated(matrix, factors)
    assert codes.tolist() == [0]
    values = torch.linalg.eigvalsh(g.double())
    assert int((values < n * torch.finfo(torch.float32).eps).sum()) > 25
    expected = solved("eigenbasis", g.double(), a.double(), damping, matrix.double())
    error = float((actual.double() - expected).norm() / expected.norm())
    condition = float(values[-1]) * float(torch.linalg.eigvalsh(a)[-1]) / damping
    # Measured: 0.008, of 0.2.
    assert error <= inverse_rounding(torch.float32, condition)


@inverses
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias"])
def test_one_step_against_a_dense_solve(frozen: str, inverse: str) -> None:
    """A frozen part counts as zero and stays. If nothing is frozen, G is zero."""
    model, x = nn.Linear(3, 2).double(), noise(5, 3)
    likelihood: Any = (lambda z: (0 * z).sum()) if frozen == "nothing" else "categorical"
    still = {"nothing": slice(0, 0), "weight": slice(0, 3), "bias": slice(3, 4)}[frozen]

    def matrix() -> Tensor:
        return torch.cat([model.weight, model.bias[:, None]], 1).detach()

    start, m = matrix(), torch.ones(2, 4).double()
    m[:, still] = 0
    for name, param in model.named_parameters():
        param.requires_grad_(name != frozen)
    opt = KFAC.paper(
        model,
        lr=0.1,
        damping=0.3,
        inverse=inverse,
        weight_decay=0.5,
        likelihood=likelihood,
    )
    step_on_ones(model, opt, x)
    g, a = held(opt)
    assert bool(g.any()) == (frozen != "nothing")
    wanted = 0.1 * (solved(inverse, g, a, 0.3, m) + 0.5 * start)
    wanted[:, still] = 0
    moved = start - matrix()
    close(moved, wanted)
    assert not moved[:, still].any()
    model.requires_grad_(True)
    for _ in range(2):
        step_on_ones(model, opt, x)
    assert bool((start != matrix()).all())


@inverses
@pytest.mark.parametrize("graft", ["adam", "sgd", "rms"])
def test_relative_damping_and_grafting_against_a_dense_solve(graft: str, inverse: str) -> None:
    """[W | b] moves by lr times the other method's norm, along its natural gradient."""
    model, x = nn.Linear(3, 2).double(), noise(5, 3)
    opt = KFAC(
        model,
        lr=0.1,
        damping=0.2,
        inverse=inverse,
        graft=graft,
        stat_interval=1,
        likelihood="categorical",
    )
    m, v = torch.zeros(2, 4).double(), torch.zeros(2, 4).double()
    units = Units({model.weight: model.bias})
    for step in range(1, 4):
        start = units.joined(model.weight, {p: p.detach() for p in model.parameters()})
        opt.zero_grad()
        output = model(x)
        opt.observe(output)
        output.softmax(1).square().sum().backward()
        opt.step()
        grad = units.joined(model.weight, {p: p.grad for p in model.parameters()})
        m, v = 0.9 * m + grad, 0.99 * v + 0.01 * grad.square()
        g, a = held(opt)
        other = m
        if graft == "adam":
            other = 0.1 * m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
        direction = solved(inverse, g, a, 0.2, m, relative=True)
        length = 0.2 * math.sqrt(8) if graft == "rms" else float(other.norm())
        moved = start - units.joined(model.weight, {p: p.detach() for p in model.parameters()})
        close(moved, 0.1 * length / direction.norm() * direction)


def test_layers_whose_gradients_are_zero_stay_where_they_are() -> None:
    """With relative damping and grafting: zero statistics give the identity, and no NaN."""
    for inverse in ("damped", "eigenbasis"):
        model = nn.Linear(3, 2)
        opt = KFAC(model, inverse=inverse, likelihood=lambda z: (0 * z).sum())
        before = [p.detach().clone() for p in model.parameters()]
        output = model(torch.randn(5, 3))
        opt.observe(output)
        (0 * output).sum().backward()
        opt.step()
        assert equal(before, model.parameters())


# ------------------------------------------------------------------ matrices without an inverse


@inverses
def test_singular_gradients_without_damping(inverse: str) -> None:
    """There are no first inverses to go on with; later the old ones stay."""
    model, x = nn.Linear(3, 2).double(), noise(5, 3)  # categorical: the rows of g sum to zero
    with pytest.raises(
        PreconditionerError, match=r"^gradient factor G of parameter.*damping is 0.0"
    ):
        step_on_ones(
            model, KFAC.paper(model, damping=0.0, inverse=inverse, likelihood="categorical"), x
        )
    opt = KFAC.paper(
        model, inverse=inverse, stat_interval=1, inverse_interval=1, likelihood="categorical"
    )
    step_on_ones(model, opt, x)
    factors = held(opt, "factors")
    opt.param_groups[0]["damping"] = 0.0
    with pytest.warns(RuntimeWarning, match="^gradient factor G could not be inverted"):
        step_on_ones(model, opt, noise(5, 3))
    kept = [torch.equal(a, b) for a, b in zip(factors, held(opt, "factors"), strict=True)]
    assert kept == ([True, False] if inverse == "damped" else [True, True, True])
    assert opt.failures()["failed_inverses"] == 1


@inverses
def test_singular_inputs_without_damping(inverse: str) -> None:
    """Fewer examples than inputs, and a G of full rank."""
    model = nn.Linear(7, 2, bias=False).double()
    opt = KFAC.paper(model, damping=0.0, inverse=inverse, likelihood="gaussian")
    x = torch.zeros(5, 7).double()
    x[:, :5] = torch.randn(5, 5)
    with pytest.raises(PreconditionerError, match=r"^input factor A of parameter.*damping is 0.0"):
        step_on_ones(model, opt, x)


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
    """Of two eigenvalues the larger is 1; the other one matters only without damping."""
    pair = [torch.diag(torch.tensor([1.0, least], dtype=torch.float64)) for least in (g, a)]
    factors = [torch.zeros(2, 2).double() for _ in range(3)]
    codes = eigenbasis([pair], damping, False, [factors])
    assert codes.tolist() == [code]
    if code == 0:
        left, right = (torch.tensor([max(x, 0.0), 1.0], dtype=torch.float64) for x in (g, a))
        close(factors[2] * (torch.outer(left, right) + damping), torch.ones(2, 2).double())


def test_convolutions_on_maps_of_one_pixel_have_an_eigenbasis() -> None:
    """Most rows of A are zero: on most such matrices LAPACK's float32 ``eigh`` fails."""
    for _ in range(4):
        model = nn.Sequential(nn.Conv2d(32, 4, 3, padding=1, bias=False), nn.Flatten())
        opt = KFAC(model, inverse="eigenbasis", likelihood="categorical")
        opt.warm_start(model(x) for x in [torch.randn(16, 32, 1, 1).relu()])
        state = opt.state[model[0].weight]
        a, vectors = state["stats"][1], state["factors"][1]
        rebuilt = (vectors * torch.linalg.eigvalsh(a.double()).float()) @ vectors.T
        torch.testing.assert_close(rebuilt, a, rtol=0, atol=FLOAT32_FORMULA * float(a.max()))


@pytest.mark.parametrize(
    ("failing", "part"), [((2, 3), "gradient factor G"), ((4,), "input factor A")]
)
def test_eigenvalues_that_do_not_converge_keep_the_old_ones(
    failing: tuple[int, ...], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    eigh, x = torch.linalg.eigh, noise(5, 3)
    opt = KFAC.paper(model, inverse="eigenbasis", stat_interval=1, likelihood="categorical")
    step_on_ones(model, opt, x)
    factors = held(opt, "factors")

    def failing_eigh(matrix: Tensor) -> Any:
        if len(matrix) in failing:
            raise torch.linalg.LinAlgError("no convergence")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", failing_eigh)
    with pytest.warns(RuntimeWarning, match=f"{part}.*1 more"):
        step_on_ones(model, opt, x)
    assert equal(factors, held(opt, "factors"))
    with pytest.raises(PreconditionerError, match=f"{part} of parameter .* could not be inverted"):
        step_on_ones(model, KFAC.paper(model, inverse="eigenbasis", likelihood="categorical"), x)
