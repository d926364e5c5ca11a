"""Shampoo's edges: bad input, degenerate statistics, failures, and the life cycle of its state."""

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drawn import noise, raising, weight
from oracle_shampoo import DenseShampoo
from test_tnt_edges import BAD_SETTINGS
from test_tnt_state import assert_close_to, conv_net, through_a_file
from tolerances import (
    BFLOAT16_SPACING,
    FLOAT32_FORMULA,
    FLOAT64_REORDERED,
    NEWTON_OPERATOR,
    NEWTON_TRAJECTORY,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tnt_optim import TNT, PreconditionerError, Shampoo

if TYPE_CHECKING:
    from conftest import Snapshot

    TakeSnapshot = Callable[..., Snapshot]

pytestmark = pytest.mark.usefixtures("one_thread")


def iterate(opt: Shampoo, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """One step on these gradients."""
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    opt.step()


def train(model: nn.Module, opt: Shampoo | TNT, first: int, last: int) -> None:
    """Steps first .. last - 1 on data that depends on the step alone."""
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 + t)
        x = torch.randn(8, 2, 4, 4, generator=generator)
        y = torch.randint(5, (8,), generator=generator)
        opt.zero_grad()
        output = model(x)
        if isinstance(opt, TNT):
            opt.observe(output)
        cross_entropy(output, y).backward()
        opt.step()


def make(model: nn.Module, **settings: Any) -> Shampoo:
    """Shampoo with T1 = 2, T2 = 5."""
    return Shampoo(model.parameters(), lr=1e-3, stat_interval=2, inverse_interval=5, **settings)


def assert_multiple_of_identity(factor: Tensor, scale: float) -> None:
    """As near as the coupled Newton iteration comes."""
    dense = factor if factor.dim() == 2 else torch.diag(factor)
    wanted = scale * torch.eye(len(dense), dtype=factor.dtype)
    torch.testing.assert_close(dense, wanted, rtol=0, atol=NEWTON_OPERATOR * scale)


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(("name", "bad"), BAD_SETTINGS)
def test_bad_setting_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Shampoo([weight(2, 3)], **{name: bad})
    opt = Shampoo([weight(2, 3)])
    with pytest.raises(ValueError, match=f"^{name} must be"):
        opt.add_param_group({"params": [weight(4)], name: bad})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("name", ["likelihood", "fisher", "seed"])
def test_nothing_is_sampled(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Shampoo([weight(2, 3)], **{name: 0})
    assert not hasattr(Shampoo([weight(2, 3)]), "observe")


def test_capturable_is_for_all_groups() -> None:
    opt = Shampoo([weight(2, 3)])
    with pytest.raises(ValueError, match="^capturable cannot be set for a parameter group"):
        opt.add_param_group({"params": [weight(4)], "capturable": False})
    with pytest.raises(ValueError, match="^capturable must be True or False, got 1"):
        Shampoo([weight(2, 3)], capturable=1)
    assert len(opt.param_groups) == 1


def test_warm_start_takes_losses(snapshot: "TakeSnapshot") -> None:
    model = nn.Linear(3, 4)
    opt = Shampoo(model.parameters())
    before = snapshot(model.parameters(), opt)
    with pytest.raises(ValueError, match=r"^outputs \(here: training losses\) must give a 0-dim"):
        opt.warm_start(model(torch.randn(2, 3)) for _ in range(2))
    with pytest.raises(ValueError, match="^outputs must hold at least one batch"):
        opt.warm_start([])
    before.assert_unchanged()


def test_added_group_joins_with_its_own_settings() -> None:
    """As if each group were an optimizer of its own, but for the step it joins at."""
    p, q = weight(3, 4), weight(5)
    settings: dict[str, Any] = {"lr": 0.1, "stat_interval": 2, "inverse_interval": 3}
    opt, start = Shampoo([p], **settings), q.detach().clone()
    iterate(opt, [p], [noise(3, 4)])
    opt.add_param_group({"params": [q], "damping": 0.5, "momentum": 0.0, "lr": 1.0})
    assert [group["step"] for group in opt.param_groups] == [1, 1]
    g = noise(5)
    iterate(opt, [p, q], [noise(3, 4), g])  # no statistics are due, but q has none yet
    expected = g / (g.square().sum() + 0.5).sqrt()
    torch.testing.assert_close(start - q.detach(), expected, rtol=0, atol=NEWTON_TRAJECTORY)


def test_groups_with_their_own_values_are_separate_optimizers() -> None:
    values: list[dict[str, Any]] = [
        {"lr": 1e-2, "damping": 0.05, "stat_interval": 1, "inverse_interval": 4, "graft": "adam"},
        {
            "lr": 3e-3, "damping": 0.2, "momentum": 0.5, "stat_decay": 0.8, "weight_decay": 0.3,
            "stat_interval": 2, "inverse_interval": 3, "max_factor_dim": 5,
            "relative_damping": True, "modes": lambda shape: (2, shape[0] // 2, *shape[1:]),
        },
    ]  # fmt: skip
    params, twins = ([weight(4, 7), weight(6, 5)] for _ in range(2))
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p.detach())
    opt = Shampoo([{"params": [p], **v} for p, v in zip(params, values, strict=True)])
    separate = [Shampoo([{"params": [q], **v}]) for q, v in zip(twins, values, strict=True)]
    for _ in range(9):
        grads = [noise(4, 7), noise(6, 5)]
        iterate(opt, params, grads)
        for other, q, g in zip(separate, twins, grads, strict=True):
            iterate(other, [q], [g])
    for p, q in zip(params, twins, strict=True):
        assert_close_to(p, q, FLOAT64_REORDERED)
    assert [len(f) for f in opt.state[params[1]]["factors"]] == [2, 3, 5]


# ------------------------------------------------------------------ degenerate statistics


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 4), (3, 4), (3, 2, 3, 3)], ids=str)
def test_zero_statistics_give_a_multiple_of_the_identity(
    shape: tuple[int, ...], relative: bool
) -> None:
    p, damping = weight(*shape), 0.003
    start, k = p.detach().clone(), min(max(len(shape), 1), 3)
    opt = Shampoo([p], lr=0.5, damping=damping, relative_damping=relative, max_factor_dim=3)
    iterate(opt, [p], [torch.zeros(shape, dtype=torch.float64)])
    assert torch.equal(p, start)
    scale = 1.0 if relative else damping ** (-1 / (2 * k))
    for factor in opt.state[p]["factors"]:
        assert_multiple_of_identity(factor, scale)
    opt.param_groups[0]["stat_interval"] = 100
    g = noise(*shape)
    iterate(opt, [p], [g])
    assert_close_to(start - p.detach(), 0.5 * scale**k * g, NEWTON_OPERATOR)


@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.1, 1e6])
@pytest.mark.parametrize("size", [0.0, 1e-21, 1e-18, 1e-17])
def test_relative_damping_takes_rounding_for_zero(size: float, damping: float) -> None:
    """Where damping times the average would vanish in float32, and S is singular."""
    p = nn.Parameter(torch.randn(3, 40))
    opt = Shampoo([p], relative_damping=True, damping=damping, stat_interval=1, graft="adam")
    for _ in range(3):
        iterate(opt, [p], [size * torch.randn(3, 40)])
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
    assert bool(p.isfinite().all())
    for factor in opt.state[p]["factors"]:
        assert_multiple_of_identity(factor, 1.0)


@pytest.mark.parametrize("graft", [None, "adam", "sgd"])
def test_zero_gradients_never_give_nan(graft: str | None) -> None:
    p = weight(3, 4)
    start, opt = p.detach().clone(), Shampoo([p], graft=graft)
    for _ in range(3):
        iterate(opt, [p], [torch.zeros(3, 4).double()])
    assert torch.equal(p, start)


@pytest.mark.parametrize("relative", [False, True])
def test_parameters_without_elements(relative: bool) -> None:
    params = [weight(0, 3), weight(0), weight(2, 3)]
    opt = Shampoo(params, relative_damping=relative, damping=0.1)
    before = params[2].detach().clone()
    iterate(opt, params, [torch.zeros_like(params[0]), torch.zeros_like(params[1]), noise(2, 3)])
    assert not torch.equal(params[2], before) and bool(params[2].isfinite().all())


@pytest.mark.parametrize("relative", [False, True])
def test_statistics_and_roots_are_symmetric_to_the_bit(relative: bool) -> None:
    p = nn.Parameter(torch.randn(65, 9, 3, 3))
    opt = Shampoo([p], relative_damping=relative, stat_interval=1, inverse_interval=1)
    for _ in range(3):
        iterate(opt, [p], [torch.randn_like(p)])
    for matrix in opt.state[p]["stats"] + opt.state[p]["factors"]:
        assert matrix.dtype == torch.float32
        assert torch.equal(matrix, matrix.T)


def test_bfloat16_parameters_keep_float32_state() -> None:
    """Each step is the oracle's, rounded to bfloat16 once."""
    shapes = [(9, 7), (4, 3, 3, 3), (6,), ()]
    params = [nn.Parameter(torch.randn(s).bfloat16()) for s in shapes]
    mirrors = [p.detach().double() for p in params]
    settings: dict[str, Any] = {
        "lr": 0.3, "damping": 0.5, "stat_interval": 2, "inverse_interval": 3
    }  # fmt: skip
    opt, oracle = Shampoo(params, **settings), DenseShampoo(mirrors, **settings)
    for _ in range(8):
        grads = [torch.randn(s).bfloat16() for s in shapes]
        for p, mirror in zip(params, mirrors, strict=True):
            mirror.copy_(p.detach())  # the gradients do not depend on it: no drift in the rest
        iterate(opt, params, grads)
        oracle.step(grads, grads)
        for p, mirror, block in zip(params, mirrors, oracle.blocks, strict=True):
            assert p.dtype == torch.bfloat16
            error = (p.detach().double() - mirror.bfloat16().double()).abs()
            assert bool((error <= BFLOAT16_SPACING * mirror.abs() + 1e-6).all())
            state = opt.state[p]
            held = [state["momentum"], *state["stats"], *state["factors"]]
            assert {x.dtype for x in held} == {torch.float32}
            for s, expected in zip(state["stats"], block.stats or [], strict=True):
                assert_close_to(s, expected, FLOAT32_FORMULA)


# ------------------------------------------------------------------ failures


def test_non_finite_gradient_changes_no_statistics() -> None:
    """It does reach momentum and parameters, as it would with any optimizer."""
    p, q = weight(3, 4), weight(5)
    opt = Shampoo([p, q], stat_interval=1, inverse_interval=1)
    iterate(opt, [p, q], [noise(3, 4), noise(5)])
    held = copy.deepcopy([opt.state[x][key] for x in (p, q) for key in ("stats", "factors")])
    with pytest.warns(RuntimeWarning, match="not finite"):
        iterate(opt, [p, q], [noise(3, 4) * math.nan, noise(5)])
    now = [opt.state[x][key] for x in (p, q) for key in ("stats", "factors")]
    torch.testing.assert_close(now, held, rtol=0, atol=1e-300)
    assert not bool(p.isfinite().any()) and bool(q.isfinite().all())
    assert opt.failures() == {"skipped_statistics": 1, "failed_inverses": 0}


def test_five_skipped_statistics_in_a_row_raise() -> None:
    p = weight(3, 4)
    opt = Shampoo([p], stat_interval=1)
    iterate(opt, [p], [noise(3, 4)])
    for _ in range(4):
        with pytest.warns(RuntimeWarning, match="not finite"):
            iterate(opt, [p], [noise(3, 4) * math.inf])
    with pytest.raises(PreconditionerError, match="time 5 in a row"):
        iterate(opt, [p], [noise(3, 4) * math.inf])


def test_first_gradient_that_is_not_finite_changes_nothing(snapshot: "TakeSnapshot") -> None:
    p = weight(3, 4)
    opt = Shampoo([p])
    p.grad = noise(3, 4) * math.nan
    before = snapshot([p], opt)
    with raising(PreconditionerError, "not finite"):
        opt.step()
    before.assert_unchanged()


@pytest.mark.parametrize("relative", [False, True])
def test_first_root_failing_changes_nothing(relative: bool, snapshot: "TakeSnapshot") -> None:
    """Damping 0 and a column that never has a gradient: S_2 is exactly singular."""
    p = weight(3, 4)
    opt = Shampoo([p], damping=0.0, relative_damping=relative)
    p.grad = noise(3, 4)
    p.grad[:, 1] = 0.0
    before = snapshot([p], opt)
    with raising(PreconditionerError, "mode 1 .* damping is 0.0"):
        opt.step()
    before.assert_unchanged()


@pytest.mark.parametrize("relative", [False, True])
def test_failed_root_keeps_the_previous_one(relative: bool) -> None:
    """Of the parameter that failed, by its name, and of no other, whatever their modes."""
    shapes = [(4,), (3, 5), (2, 3, 4), (2, 3), (6,)]
    params = [weight(*shape) for shape in shapes]
    opt = Shampoo(
        [(f"p{n}", p) for n, p in enumerate(params)],
        stat_interval=100,
        inverse_interval=1,
        relative_damping=relative,
    )
    iterate(opt, params, [noise(*shape) for shape in shapes])
    for n in (1, 3):
        opt.state[params[n]]["stats"][1].neg_()
    for p in params:
        for s in opt.state[p]["stats"]:
            s.mul_(4.0)
    before = [[f.clone() for f in opt.state[p]["factors"]] for p in params]
    for count in range(1, 5):
        with pytest.warns(RuntimeWarning, match=r"mode 1 .*'p1' .*\(and of 1 other"):
            iterate(opt, params, [noise(*shape) for shape in shapes])
        assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 2 * count}
        for n, p in enumerate(params):
            kept = [
                torch.equal(f, old)
                for f, old in zip(opt.state[p]["factors"], before[n], strict=True)
            ]
            assert all(kept) if n in (1, 3) else not any(kept)
    with raising(PreconditionerError, "time 5 in a row"):
        iterate(opt, params, [noise(*shape) for shape in shapes])


# ------------------------------------------------------------------ checkpoints and copies

RESUMABLE: dict[str, dict[str, Any]] = {
    "paper": {},
    "diagonal": {"max_factor_dim": 4},
    "grafted": {"graft": "adam", "relative_damping": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("stop", [1, 7, 10])
@pytest.mark.parametrize("name", RESUMABLE)
def test_resumed_training_is_bit_for_bit_the_uninterrupted(
    name: str, stop: int, warm: bool, snapshot: "TakeSnapshot"
) -> None:
    """Stopped inside an interval (7 = T2 + 2, odd to T1 = 2), at its edge, and after one step."""
    model = conv_net()
    opt = make(model, **RESUMABLE[name])
    if warm:
        x, y = torch.randn(3, 8, 2, 4, 4), torch.randint(5, (3, 8))
        opt.warm_start((cross_entropy(model(x[n]), y[n]) for n in range(3)), model=model)
    train(model, opt, 0, stop)
    files = through_a_file((model.state_dict(), opt.state_dict()))
    train(model, opt, stop, stop + 8)
    resumed = conv_net()
    resumed.load_state_dict(files[0])
    fresh = make(resumed, **RESUMABLE[name])
    fresh.load_state_dict(files[1])
    train(resumed, fresh, stop, stop + 8)
    snapshot(model.parameters(), opt).assert_equals(snapshot(resumed.parameters(), fresh))


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_continue_bit_for_bit(clone: Callable[[Any], Any], snapshot: "TakeSnapshot") -> None:
    model = conv_net()
    opt = make(model)
    train(model, opt, 0, 7)
    model2, opt2 = clone((model, opt))
    train(model, opt, 7, 14)
    pairs = zip(model.parameters(), model2.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs), "the copy is not a copy"
    train(model2, opt2, 7, 14)
    snapshot(model.parameters(), opt).assert_equals(snapshot(model2.parameters(), opt2))


@pytest.mark.parametrize(("saved", "loaded"), [(TNT, Shampoo), (Shampoo, TNT)])
def test_another_methods_state_is_refused(
    saved: type[TNT] | type[Shampoo], loaded: type[TNT] | type[Shampoo], snapshot: "TakeSnapshot"
) -> None:
    """Its tensors and settings have the same form, and are something else."""
    model, other = conv_net(), conv_net()
    first, second = saved(model.parameters()), loaded(other.parameters())
    train(model, first, 0, 2)
    train(other, second, 0, 2)
    before = snapshot(other.parameters(), second)
    message = f"^state_dict must be of {loaded.__name__}, got that of {saved.__name__}"
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(through_a_file(first.state_dict()))
    before.assert_unchanged()


@pytest.mark.parametrize("method", [TNT, Shampoo])
def test_state_that_does_not_say_its_method_is_taken(method: type[TNT] | type[Shampoo]) -> None:
    """As torch.distributed.checkpoint returns it, or saved by an earlier version."""
    model = conv_net()
    opt = method(model.parameters())
    train(model, opt, 0, 2)
    state = opt.state_dict()
    fresh = type("Derived", (method,), {})(model.parameters())
    fresh.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["step"] == 2


# ------------------------------------------------------------------ steps


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    model = nn.Linear(3, 4).double()
    twin = copy.deepcopy(model)
    opt, opt2 = (Shampoo(m.parameters(), lr=1e-2) for m in (model, twin))
    x = noise(5, 3)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        opt2.zero_grad()
        expected = twin(x).square().mean()
        expected.backward()
        assert opt2.step() is None
        assert torch.equal(torch.as_tensor(opt.step(closure)), expected)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_parameter_without_gradient_keeps_still() -> None:
    """Neither moved nor decayed, and one that is new to gradients starts its statistics then."""
    params = [weight(3, 4), weight(5), weight(2, 2)]
    mirrors = [p.detach().clone() for p in params]
    settings: dict[str, Any] = {
        "lr": 0.01, "damping": 0.1, "weight_decay": 0.5, "stat_interval": 3, "inverse_interval": 5
    }  # fmt: skip
    opt, oracle = Shampoo(params, **settings), DenseShampoo(mirrors, **settings)
    for t in range(16):
        grads: list[Tensor | None] = [noise(3, 4), noise(5), noise(2, 2)]
        if t % 3 == 1:
            grads[1] = None
        if t < 4:
            grads[2] = None
        iterate(opt, params, grads)
        oracle.step(grads, grads)
        for p, mirror in zip(params, mirrors, strict=True):
            assert_close_to(p, mirror, NEWTON_TRAJECTORY)


def test_gradients_are_left_alone() -> None:
    model = conv_net()
    opt = make(model, weight_decay=0.1)
    train(model, opt, 0, 4)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    opt.step()
    assert all(map(torch.equal, grads, [p.grad for p in model.parameters()]))


def test_repr_names_the_class_and_the_settings() -> None:
    text = repr(Shampoo(conv_net().parameters(), lr=0.0123, inverse_interval=17))
    assert text.startswith("Shampoo (") and "0.0123" in text and "17" in text
