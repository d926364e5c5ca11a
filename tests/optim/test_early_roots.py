"""Inverse square roots of the statistics, until the gradients' mean no longer dominates them."""

import copy
import math
from typing import Any

import pytest
import torch
from drawn import noise, weight
from optimizers import leaves, net, through_a_file, train
from oracle import damped_covariances
from tolerances import FLOAT64_FORMULA
from torch import Tensor, nn

from tnt_kernels import inverse_root
from tnt_optim import TNT
from tnt_optim.factors import LEAST_SHARE, mean_share

SHAPES = [(6, 5), (7,), (3, 4, 2), (1, 5)]


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_roots_are_those_of_the_damped_inverse(kind: str) -> None:
    """A A (U + damping c I) is a multiple of I; diagonal modes, scalars, zeros too."""
    stats = []
    for shape in SHAPES:
        grads = [noise(*shape).double() for _ in range(12)]
        full = [
            sum(g.movedim(i, 0).flatten(1) @ g.movedim(i, 0).flatten(1).T for g in grads) / 12
            if len(shape) > 1
            else sum(torch.outer(g, g) for g in grads) / 12
            for i in range(len(shape))
        ]
        stats.append(full if kind == "full" else [s.diagonal().clone() for s in full])
    stats.append([torch.zeros_like(s) for s in stats[0]])
    out = [
        [torch.eye(len(s)).double() if s.dim() == 2 else s * 0 + 1 for s in row] for row in stats
    ]
    before = [[s.clone() for s in row] for row in stats]
    info = inverse_root(stats, 0.3, 2, out, relative=True)[1]
    assert info.tolist() == [0] * len(stats)
    for row, old, roots in zip(stats, before, out, strict=True):
        matrices = [s if s.dim() == 2 else s.diag() for s in row]
        for damped, root in zip(damped_covariances(matrices, 0.3, True), roots, strict=True):
            a = root if root.dim() == 2 else root.diag()
            product = a @ a @ damped
            multiple = product.diagonal().mean()
            identity = torch.eye(len(a), dtype=torch.float64)
            close = {"rtol": 0, "atol": FLOAT64_FORMULA}
            torch.testing.assert_close(product / multiple, identity, **close)
        assert all(map(torch.equal, row, old))


def state_after(grads: list[Tensor], momentum: float, decay: float = 0.9) -> dict[str, Any]:
    """The entries of a state that ``mean_share`` reads, after these gradients."""
    m = torch.zeros_like(grads[0])
    trace = None
    for g in grads:
        m = momentum * m + g
        square = g.square().sum()
        trace = square if trace is None else decay * trace + (1 - decay) * square
    stats = [torch.full((d,), float(trace) / d) for d in m.shape]
    return {"momentum": m, "updates": len(grads), "stats": stats, "block_size": None}


def test_the_share_of_the_mean() -> None:
    """One for gradients that are all alike, about zero for noise, and in between a fraction."""
    mean = torch.ones(30, 40)
    alike = mean_share(state_after([mean] * 5, 0.9), 0.9)
    assert float(alike) == pytest.approx(1.0, abs=1e-6)
    rng = torch.Generator().manual_seed(0)
    draws = [torch.randn(30, 40, generator=rng) for _ in range(60)]
    assert abs(float(mean_share(state_after(draws, 0.9), 0.9))) < 0.02
    half = mean_share(state_after([mean + g for g in draws], 0.9), 0.9)
    assert float(half) == pytest.approx(0.5, abs=0.05)
    # The average has a tenth of the noise's square at mu = 0.9, a third at 0.5: both are taken off.
    assert float(mean_share(state_after([mean + g for g in draws], 0.5), 0.5)) == pytest.approx(
        0.5, abs=0.1
    )
    assert float(mean_share(state_after(draws, 0.0), 0.0)) == 0.0
    assert math.isnan(float(mean_share(state_after([0 * mean] * 3, 0.9), 0.9)))
    assert mean_share({**state_after(draws, 0.9), "updates": 0}, 0.9) is None


def steps(opt: TNT, params: list[nn.Parameter], grads: list[list[Tensor]]) -> list[bool]:
    """Takes steps with dictated gradients; returns whether roots were in use after each."""
    taken = []
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.clone()
        opt.step()
        taken.append(opt.param_groups[0]["takes_roots"])
    return taken


def test_roots_end_with_the_mean_and_for_good() -> None:
    """Where gradients stay alike they never end; with noise soon; a later mean changes nothing."""
    params = [weight(6, 5), weight(4, 3), weight(7)]
    mean = [noise(*p.shape) for p in params]

    def noisy(size: float) -> list[Tensor]:
        return [m + size * noise(*m.shape) for m in mean]

    opt = TNT(params, interval_warmup=500)
    assert all(steps(opt, params, [noisy(0.1) for _ in range(40)]))
    taken = steps(opt, params, [noisy(10.0) for _ in range(80)])
    assert taken[0] and not taken[-1]
    assert not any(steps(opt, params, [noisy(0.0) for _ in range(80)]))
    # The factors of vectors are ones, and have no part in it.
    assert opt.param_groups[0]["step"] == 200


def test_shares_decide_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all parameters of all groups whose factors are due, one share each."""
    seen: list[float] = []
    shares = iter([0.9, 0.0, 0.0, 0.9, -0.3, 0.1])
    monkeypatch.setattr(
        "tnt_optim.factors.mean_share",
        lambda state, momentum: torch.tensor(seen.append(momentum) or next(shares)).double(),
    )
    params = [weight(2, 3), weight(3, 4), weight(4, 5)]
    groups = [{"params": params[:1], "momentum": 0.8}, {"params": params[1:]}]
    opt = TNT(groups)
    grads = [[noise(*p.shape) for p in params] for _ in range(3)]
    # The first step has no earlier gradients, and makes its factors without a question.
    assert steps(opt, params, grads) == [True, True, False]
    assert LEAST_SHARE < (0.9 + 0.0 + 0.0) / 3 and (0.9 - 0.3 + 0.1) / 3 < LEAST_SHARE
    assert not any(group["takes_roots"] for group in opt.param_groups)
    assert sorted(seen) == [0.8, 0.8, 0.9, 0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"likelihood": "categorical"}, False),
        ({"early_roots": False}, False),
        ({"graft": None}, False),
        ({"graft": None, "early_roots": True}, True),
        ({"relative_damping": False}, False),
        ({"momentum": 0.0}, True),
    ],
)
def test_which_forms_begin_with_roots(settings: dict[str, Any], expected: bool) -> None:
    model = net()
    opt = TNT(model.parameters(), **settings)
    assert opt.param_groups[0]["takes_roots"] == expected
    assert not TNT.paper(model.parameters(), likelihood=None).param_groups[0]["takes_roots"]


def test_roots_with_an_absolute_damping_are_refused() -> None:
    params = list(net().parameters())
    for given in (
        {"relative_damping": False, "early_roots": True},
        {"params": [{"params": params, "relative_damping": False}]},
    ):
        with pytest.raises(ValueError, match="early_roots must be False where relative_damping"):
            TNT(**{"params": params, **given})


@pytest.mark.parametrize("before", [2, 30])
def test_a_resumed_training_is_the_training(before: int) -> None:
    """To the bit, whether the roots have ended or not."""
    model = net()
    opt = TNT(model.parameters())
    train(model, opt, range(before))
    twin = copy.deepcopy(model)
    other = TNT(twin.parameters())
    other.load_state_dict(through_a_file(opt.state_dict()))
    assert other.param_groups[0]["takes_roots"] == opt.param_groups[0]["takes_roots"]
    train(model, opt, range(before, before + 30))
    train(twin, other, range(before, before + 30))
    assert leaves(opt.state_dict()) == leaves(other.state_dict())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_state_of_an_earlier_version_goes_on_as_it_was() -> None:
    """It has no such settings: its training had heavy-ball momentum and inverses."""
    model = net()
    old = TNT(model.parameters(), nesterov=False, early_roots=False)
    train(model, old, range(3))
    saved = old.state_dict()
    for group in saved["param_groups"]:
        for name in ("nesterov", "early_roots", "takes_roots"):
            del group[name]
    twin = copy.deepcopy(model)
    new = TNT(twin.parameters())
    new.load_state_dict(saved)
    group = new.param_groups[0]
    assert not (group["nesterov"] or group["early_roots"] or group["takes_roots"])
    train(model, old, range(3, 9))
    train(twin, new, range(3, 9))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
