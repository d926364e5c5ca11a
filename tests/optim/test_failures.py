"""Failures: counted, warned of, raised when they repeat; and faults in the middle of a step.

Statistics that are not finite, factors that cannot be computed, operators that raise, too little
memory. Several processes are in tests/distributed, the operators themselves in tests/kernels.
"""

import contextlib
import copy
import itertools
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drawn import close, noise, raising, weight
from optimizers import (
    FACTORED,
    METHODS,
    NO_FAILURES,
    Dictated,
    equal,
    factored,
    made,
    net,
    no_memory,
    statistics,
    through_a_file,
    train,
    values,
)
from oracle import contraction
from torch import Tensor, nn

import tnt_kernels
from tnt_optim import KFAC, TNT, PreconditionerError, first_states, with_fallback

EVERY_STEP: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1}


def spoiled(gradient: Tensor, value: float = math.nan) -> Tensor:
    """The gradient with one entry replaced."""
    bad = gradient.clone()
    bad.reshape(-1)[-1] = value
    return bad


# ------------------------------------------------------------------ statistics


@factored
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_no_statistics(name: str, value: float) -> None:
    """A sampled one changes nothing else; a training gradient reaches its own parameter."""
    p, q = weight(3, 4), weight(5)
    run = Dictated(name, [p, q], **EVERY_STEP)
    run.step([noise(3, 4), noise(5)])
    held = run.stats() + run.factors()
    bad, good = [spoiled(noise(3, 4), value), noise(5)], [noise(3, 4), noise(5)]
    with pytest.warns(RuntimeWarning, match="not finite"):
        moves = run.step(good if name == "sampled" else bad, bad)
    assert all(map(torch.equal, held, run.stats() + run.factors()))
    assert bool(p.isfinite().all()) == (name == "sampled") == bool(p.isfinite().any())
    assert bool(q.isfinite().all()) and bool(moves[1].any())
    assert run.opt.failures() == {**NO_FAILURES, "skipped_statistics": 1}


@factored
def test_five_skipped_statistics_in_a_row_raise(name: str) -> None:
    """A good refresh starts the count of a row anew. The state from before loads afterwards."""
    run = Dictated(name, [weight(3, 4)], **EVERY_STEP, lr=0.0)
    good, bad = [noise(3, 4)], [spoiled(noise(3, 4))]
    assert run.opt.failures() == NO_FAILURES
    for expected in (4, 8):
        run.step(good)
        for _ in range(4):
            with pytest.warns(RuntimeWarning, match="not finite"):
                run.step(bad)
        assert run.opt.failures() == {**NO_FAILURES, "skipped_statistics": expected}
    saved = copy.deepcopy(run.opt.state_dict())
    with raising(PreconditionerError, "not finite.*time 5 in a row"):
        run.step(bad)
    assert copy.deepcopy(run.opt).failures()["skipped_statistics"] == 9
    run.opt.load_state_dict(saved)
    assert run.opt.failures()["skipped_statistics"] == 8
    run.step(good)


@factored
def test_a_first_gradient_that_is_not_finite_raises_and_changes_nothing(name: str) -> None:
    """The next observation is then the first one, not an average with the bad one."""
    p, q = weight(5), weight(3, 4)
    run = Dictated(name, [p, q])
    good, bad = [noise(5), noise(3, 4)], [noise(5), spoiled(noise(3, 4))]
    before = run.snapshot()
    with raising(PreconditionerError, "not finite.* for parameter 1 of group 0"):
        run.step(bad)
    run.opt.zero_grad()
    before.assert_unchanged()
    run.step(good)
    for i in range(2):
        close(run.stats(q)[i], contraction(good[1], i))


@factored
def test_warm_starts_leave_out_batches_that_are_not_finite(name: str) -> None:
    run = Dictated(name, [weight(3, 4)])
    before = run.snapshot()
    with pytest.raises(PreconditionerError, match="none of 2 batches gave a finite gradient"):
        run.warm_start([[noise(3, 4) * math.nan]] * 2)
    before.assert_unchanged()
    good = noise(3, 4)
    run.warm_start([[noise(3, 4) * math.nan], [good]])
    close(run.stats()[0], contraction(good, 0))
    assert run.opt.failures() == {**NO_FAILURES, "skipped_statistics": 1}


@factored
def test_messages_name_parameters_that_are_not_finite_and_their_rate(name: str) -> None:
    """From the first warning on; no word of divergence while all parameters are finite."""
    p, q = weight(3, 4), weight(5)
    groups = [{"params": [("first", p)]}, {"params": [("second", q)], "lr": torch.tensor(0.5)}]
    run = Dictated(name, groups, **EVERY_STEP, lr=0.25)
    good, bad = [noise(3, 4), noise(5)], [noise(3, 4), spoiled(noise(5))]
    run.step(good)
    with pytest.warns(RuntimeWarning, match="not finite") as said:
        run.step(good if name == "sampled" else bad, bad)
    assert not any("diverged" in str(w.message) for w in said)
    q.data.fill_(math.inf)
    for _ in range(3):
        with pytest.warns(RuntimeWarning, match="diverged.*parameters 'second' of group 1 with lr"):
            run.step(good if name == "sampled" else bad, bad)
    p.data[1, 2] = math.nan
    message = "5 in a row.*diverged.* 'first' of group 0 with lr=0.25, 'second' of group 1 with lr="
    with raising(PreconditionerError, message + "0.5 are not finite.*lower lr"):
        run.step(bad)


def test_parameters_without_a_name_have_their_number_in_messages() -> None:
    """Names and parameters that were removed by hand."""
    params = [("a", weight(2)), ("b", weight(3)), ("c", weight(4))]
    run = Dictated("empirical", [{"params": params}], **EVERY_STEP)
    gradients = [noise(2), noise(3), noise(4)]
    run.step(gradients)
    del run.opt.param_groups[0]["param_names"][1:]
    params[2][1].data.fill_(math.nan)
    with pytest.warns(RuntimeWarning, match="diverged: parameters 2 of group 0"):
        run.step([*gradients[:2], spoiled(gradients[2])])
    assert "parameter_norm/0.2" in run.opt.diagnostics()


@factored
def test_a_first_gradient_of_parameters_that_are_not_finite_names_them(name: str) -> None:
    params = [weight(2) * math.nan for _ in range(5)]
    run = Dictated(name, [p.detach().requires_grad_() for p in params])
    with raising(PreconditionerError, "first gradient.*diverged.* 0 of group 0.* 2 .*and 2 more"):
        run.step([spoiled(noise(2)) for _ in params])


@pytest.mark.parametrize("name", METHODS)
def test_gradients_that_vanish_are_no_failure(name: str) -> None:
    """In a deep network the squares of the first layers' gradients are no normal numbers."""
    layers = [layer for _ in range(26) for layer in (nn.Linear(32, 32), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    opt = made(name, model, relative_damping=True, graft="adam")
    output = model(torch.randn(64, 32))
    opt.observe(output)
    nn.functional.cross_entropy(output, torch.arange(64) % 10).backward()
    assert float(model[0].weight.grad.abs().max()) < 1e-19
    opt.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_relative_damping_without_grafting_is_warned_of() -> None:
    """Once for a group; LoRA's A, whose gradient is zero at first, then makes training diverge."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ({"relative_damping": True, "graft": "sgd"}, {"relative_damping": False}):
            opt = TNT.paper([weight(3)], likelihood="categorical", **settings)
        with pytest.raises(RuntimeWarning, match="graft=None.*LoRA's A.*Set graft='adam'"):
            opt.add_param_group({"params": [weight(2)], "relative_damping": True})
        with pytest.raises(RuntimeWarning, match="graft=None"):
            KFAC.paper(nn.Linear(3, 2), relative_damping=True, likelihood="categorical")


# ------------------------------------------------------------------ factors


@factored
@pytest.mark.parametrize(
    ("form", "mode"), [({}, 1), ({"relative_damping": True}, 1), ({"block_size": 4}, 0)]
)
def test_a_first_factor_that_fails_raises_and_changes_nothing(
    name: str, form: dict[str, Any], mode: int
) -> None:
    """Damping 0, a column without a gradient: S_2 is singular, with blocks the second one's S_1."""
    run = Dictated(name, [weight(4, 8)], damping=0.0, **form)
    gradient = noise(4, 8)
    gradient[:, 5] = 0.0  # in the second block
    before = run.snapshot()
    with raising(PreconditionerError, f"mode {mode} of parameter 0 of group 0.* damping is 0.0"):
        run.step([gradient])
    run.opt.zero_grad()
    before.assert_unchanged()


@factored
@pytest.mark.parametrize("relative", [False, True])
def test_a_failed_factor_keeps_the_previous_one(name: str, relative: bool) -> None:
    """Two of five parameters fail: they keep their factors, and the warning names one of them."""
    shapes = [(4,), (3, 5), (2, 3, 4), (2, 3), (6,)]
    params = [weight(*shape) for shape in shapes]
    named = [(f"p{n}", p) for n, p in enumerate(params)]
    settings: dict[str, Any] = {"stat_interval": 100, "inverse_interval": 1, "lr": 0.1}
    run = Dictated(name, named, **settings, relative_damping=relative, momentum=0.0)
    run.step([noise(*shape) for shape in shapes])
    for n in (1, 3):
        for stat in run.opt.state[params[n]]["stats"]:
            stat.neg_()
    for stat in [s for p in params for s in run.opt.state[p]["stats"]]:
        stat.mul_(4.0)
    before = [run.factors(p) for p in params]
    for count in range(1, 5):
        gradients = [noise(*shape) for shape in shapes]
        with pytest.warns(RuntimeWarning, match=r"mode \d .*'p1' .*\(and 1 more\)"):
            moves = run.step(gradients)
        assert run.opt.failures() == {**NO_FAILURES, "failed_inverses": 2 * count}
        for n, p in enumerate(params):
            kept = list(map(torch.equal, run.factors(p), before[n]))
            assert all(kept) if n in (1, 3) else not any(kept)
        close(-moves[1], 0.1 * (before[1][0] @ gradients[1] @ before[1][1]))
    with raising(PreconditionerError, "'p1'.*time 5 in a row"):
        run.step([noise(*shape) for shape in shapes])


def test_warnings_name_the_line_that_called_step() -> None:
    run = Dictated("sampled", [weight(3, 4)], stat_interval=1)
    schedule = torch.optim.lr_scheduler.ConstantLR(run.opt)  # wraps step once more
    run.step([noise(3, 4)])
    with pytest.warns(RuntimeWarning) as said:
        run.opt.step()
        run.observe([noise(3, 4) * math.nan])
        run.opt.step()
    assert ["observe(output)" in str(w.message) for w in said] == [True, False]
    assert [w.filename for w in said] == [__file__] * 2
    schedule.step()


# ------------------------------------------------------------------ gradients


@factored
def test_sparse_gradients_are_refused(name: str) -> None:
    (p,) = params = [weight(4, 3)]
    run = Dictated(name, params)
    run.step([noise(4, 3)])
    p.grad = noise(4, 3).to_sparse()
    held = [p.detach().clone(), run.opt.state[p]["momentum"].clone()]
    with raising((RuntimeError, ValueError, TypeError), "sparse"):
        run.opt.step()
    assert torch.equal(p, held[0]) and torch.equal(run.opt.state[p]["momentum"], held[1])


# ------------------------------------------------------------------ faults within a step

SHAPES = [(3, 4), (5,), (4, 4)]  # the last one in a group of its own


class Run(Dictated):
    """Parameters in two groups, whose gradients are functions of the step's number."""

    def __init__(self, name: str, **settings: Any) -> None:
        rng = torch.Generator().manual_seed(1)
        params = [nn.Parameter(torch.randn(s, generator=rng).double()) for s in SHAPES]
        # With equal settings they would be one call of an operator.
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.01}]
        super().__init__(name, groups, **{"lr": 0.05, "damping": 0.1, **EVERY_STEP, **settings})

    def gradients(self, number: int) -> list[list[Tensor]]:
        """The gradients of a step, and its sampled gradients."""
        rng = torch.Generator().manual_seed(100 + number)
        return [[torch.randn(s, generator=rng).double() for s in SHAPES] for _ in range(2)]

    def steps(self, first: int, last: int) -> None:
        """Some steps."""
        for number in range(first, last):
            self.step(*self.gradients(number))

    def checkpoint(self) -> dict[str, Any]:
        """Parameters and state, through a file."""
        params = [p.detach() for p in self.params]
        saved: dict[str, Any] = through_a_file({"params": params, "opt": self.opt.state_dict()})
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        """Goes back to a checkpoint."""
        with torch.no_grad():
            for param, value in zip(self.params, saved["params"], strict=True):
                param.copy_(value)
        self.opt.load_state_dict(saved["opt"])

    def momenta(self) -> list[Tensor]:
        """Copies of parameters and momenta, which only the update may change."""
        held = [self.opt.state[p]["momentum"] for p in self.params]
        return [t.detach().clone() for t in (*self.params, *held)]


@contextlib.contextmanager
def failing(operator: str, call: int, error: Exception | None = None) -> Iterator[None]:
    """One call of an operator of tnt_kernels raises, counted from 0.

    A group with settings of its own is one call.
    """
    original = getattr(tnt_kernels, operator)
    numbers = itertools.count()

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == call:
            raise error or InjectedError(operator)
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for module in [m for key, m in sys.modules.items() if key.startswith("tnt_optim")]:
            if getattr(module, operator, None) is original:
                patch.setattr(module, operator, wrapped)
        yield
    assert next(numbers) > call  # it was called


class InjectedError(RuntimeError):
    """Raised on purpose."""


def factor_operator(name: str) -> str:
    return "inverse_root" if name == "shampoo" else "damped_inverse"


@factored
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("where", ["statistics", "factors"])
def test_after_an_exception_before_the_update_another_step_follows(
    name: str, where: str, group: int
) -> None:
    run = Run(name)
    run.steps(0, 3)
    held = run.momenta()
    operator = "gram_ema_" if where == "statistics" else factor_operator(name)
    with failing(operator, group), pytest.raises(InjectedError):
        run.steps(3, 4)
    assert all(map(torch.equal, run.momenta(), held))
    run.steps(4, 5)
    assert not any(map(torch.equal, run.momenta(), held))
    assert all(bool(tensor.isfinite().all()) for tensor in run.momenta())


@factored
@pytest.mark.parametrize("graft", [None, "adam"])
@pytest.mark.parametrize("group", [0, 1])
def test_after_an_exception_in_the_update_a_checkpoint_goes_on(
    name: str, group: int, graft: str | None
) -> None:
    """Groups before it have moved, so only a checkpoint is consistent."""
    run, undisturbed = Run(name, graft=graft), Run(name, graft=graft)
    run.steps(0, 3)
    undisturbed.steps(0, 6)
    saved, held = run.checkpoint(), run.momenta()
    operator = "grafted_directions_" if graft else "preconditioned_step_"
    with failing(operator, group), pytest.raises(InjectedError):
        run.steps(3, 4)
    same = list(map(torch.equal, run.momenta(), held))
    assert same == [group == 0] * 2 + [True] + [group == 0] * 2 + [True]
    run.load(saved)
    run.steps(3, 6)
    run.snapshot().assert_equals(undisturbed.snapshot())


@pytest.mark.parametrize("name", [*METHODS, "fallback"])
@pytest.mark.parametrize("call", [0, 1])
def test_an_update_that_stopped_is_finished_by_the_next_step(name: str, call: int) -> None:
    """With the gradients of the step that stopped, whatever comes before the next one.

    ``scaled_step_`` is called after the momenta have changed, once for each of two groups.
    """
    runs = []
    for fails in (False, True):
        model = net()
        torch.manual_seed(0)
        opt = grouped(name, model)
        train(model, opt, range(2))
        if fails:
            with failing("scaled_step_", call), pytest.raises(InjectedError):
                train(model, opt, [2])
            assert all(p.grad is None for p in model.parameters())
            main = getattr(opt, "main", opt)
            assert main.has_unfinished_update
            with pytest.warns(RuntimeWarning, match="stopped in the middle of its update.*step"):
                copied = copy.deepcopy(opt.state_dict())
            with failing("scaled_step_", 0), pytest.raises(InjectedError):  # once more
                train(model, opt, [7])
            train(model, opt, [8])  # other gradients, which the update does not take
            assert not main.has_unfinished_update and copied["param_groups"][0]["step"] == 2
            train(model, opt, [3])
        else:
            train(model, opt, [2, 3])
        runs.append([*statistics(opt), *values(model)])
    assert equal(*runs)


@pytest.mark.parametrize("name", [*METHODS, "fallback"])
def test_a_stopped_update_is_forgotten_by_a_checkpoint_and_by_an_interrupt(name: str) -> None:
    """A state that is loaded goes on from its own step. After Ctrl-C nothing can be finished."""
    runs = []
    for fails in (False, True):
        model = net()
        torch.manual_seed(0)
        opt = grouped(name, model)
        main = getattr(opt, "main", opt)
        train(model, opt, range(2))
        saved = copy.deepcopy([model.state_dict(), opt.state_dict()])
        if fails:
            with failing("scaled_step_", 1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
                train(model, opt, [2])
            assert not main.has_unfinished_update
            with failing("scaled_step_", 1), pytest.raises(InjectedError):
                train(model, opt, [2])
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])
            assert not main.has_unfinished_update
        train(model, opt, [2, 3])
        runs.append([*statistics(opt), *values(model)])
    assert equal(*runs)


def grouped(name: str, model: nn.Sequential) -> Any:
    """The optimizer of this name, with every step due and two calls of ``scaled_step_``."""
    settings = {**EVERY_STEP, "graft": "adam", "lr": 0.02}
    first, last = model[0], model[2]
    if name == "fallback":
        groups = [{"params": [first.weight]}, {"params": [last.weight], "weight_decay": 0.1}]
        return with_fallback(
            TNT(groups, likelihood="categorical", **settings),
            torch.optim.AdamW([first.bias, last.bias]),
        )
    groups = [{"params": first.parameters()}, {"params": last.parameters(), "weight_decay": 0.1}]
    if name in ("kfac", "eigenbasis"):
        return made(name, model, params=groups, **settings)
    return FACTORED[name](groups, **settings)


@factored
def test_first_gradients_that_overflow_only_together_are_finite(name: str) -> None:
    """Each Gram matrix is finite; the sum of all squared norms is not."""
    params = [weight(3, 4) for _ in range(8)]
    run = Dictated(name, params, **EVERY_STEP, relative_damping=True, graft="adam")
    gradients = [torch.full((3, 4), 3e153, dtype=torch.float64) for _ in params]
    assert not torch.stack(gradients).norm().square().isfinite()
    run.step(gradients)
    assert run.opt.failures() == NO_FAILURES
    assert all(bool(stat.isfinite().all()) for p in params for stat in run.stats(p))


@factored
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("where", ["statistics", "factors"])
@pytest.mark.parametrize(("step", "resumed"), [(0, False), (3, False), (4, False), (4, True)])
def test_a_step_that_ran_out_of_memory_can_be_repeated(
    name: str, step: int, resumed: bool, where: str, group: int
) -> None:
    """The repeated step has the bits of one with enough memory. A first one changes nothing."""
    run, undisturbed = Run(name, inverse_interval=4), Run(name, inverse_interval=4)
    run.steps(0, step)
    undisturbed.steps(0, step + 2)
    operator = "gram_ema_" if where == "statistics" else factor_operator(name)
    before, error = run.snapshot(), torch.OutOfMemoryError("no memory")
    with failing(operator, group, error), raising(type(error), "no memory"):
        run.steps(step, step + 1)
    if step == 0:
        run.opt.zero_grad()
        before.assert_unchanged()
    if resumed:
        run.load(run.checkpoint())
    run.steps(step, step + 2)
    run.snapshot().assert_equals(undisturbed.snapshot())


def test_a_first_step_without_memory_for_momenta_can_be_repeated() -> None:
    """The weight has its statistics when memory runs out for the bias's state."""
    new_state = first_states.new_state

    def no_memory_for_vectors(*given: Any, plain: bool = False, **named: Any) -> Any:
        return no_memory() if plain else new_state(*given, plain=plain, **named)

    runs = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = net()
        opt = TNT(model.parameters(), likelihood="categorical")
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(first_states, "new_state", no_memory_for_vectors)
                with pytest.raises(torch.OutOfMemoryError):
                    train(model, opt, [0])
        train(model, opt, range(2))
        runs.append([*statistics(opt), *values(model)])
    assert equal(*runs)
