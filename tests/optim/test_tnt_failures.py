"""Non-finite sampled gradients and failed inverses: survived, counted, reported, then raised."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from drawn import close, noise, raising, weight
from oracle import contraction
from torch import Tensor, nn

from tnt_optim import TNT

if TYPE_CHECKING:
    from conftest import DirectGradients, Snapshot

    Direct = Callable[[Sequence[Tensor]], DirectGradients]
    TakeSnapshot = Callable[..., Snapshot]


def spoiled(gradient: Tensor, value: float) -> Tensor:
    """The gradient with one entry replaced."""
    bad = gradient.clone()
    bad.reshape(-1)[-1] = value
    return bad


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_sampled_gradient_changes_no_statistics(direct: "Direct", value: float) -> None:
    p, q = weight(3, 4), weight(5)
    harness = direct([p, q])
    opt = TNT([p, q], stat_interval=1, inverse_interval=1, likelihood=harness.likelihood)
    harness.iterate(opt, [noise(3, 4), noise(5)], [noise(3, 4), noise(5)])
    held = [s.clone() for x in (p, q) for s in opt.state[x]["stats"] + opt.state[x]["factors"]]
    before = p.detach().clone()
    with pytest.warns(RuntimeWarning):
        bad = [spoiled(noise(3, 4), value), noise(5)]
        harness.iterate(opt, [noise(3, 4), noise(5)], bad)
    now = [s for x in (p, q) for s in opt.state[x]["stats"] + opt.state[x]["factors"]]
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))
    assert bool(torch.isfinite(p).all()) and not torch.equal(p, before)
    failures = opt.failures()
    assert failures["skipped_statistics"] >= 1 and failures["failed_inverses"] == 0


def test_skipped_statistics_are_counted_and_five_in_a_row_raise(direct: "Direct") -> None:
    p = weight(3, 4)
    harness = direct([p])
    opt = TNT([p], stat_interval=1, inverse_interval=1, likelihood=harness.likelihood)
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}
    for expected in (4, 8):  # a good step between, and the row begins anew
        harness.iterate(opt, [noise(3, 4)], [noise(3, 4)])
        for _ in range(4):
            with pytest.warns(RuntimeWarning):
                harness.iterate(opt, [noise(3, 4)], [spoiled(noise(3, 4), math.nan)])
        assert opt.failures() == {"skipped_statistics": expected, "failed_inverses": 0}
    with raising(RuntimeError, "finite|row|observ"):
        harness.iterate(opt, [noise(3, 4)], [spoiled(noise(3, 4), math.nan)])


def test_non_finite_first_sampled_gradient_raises_and_changes_nothing(
    direct: "Direct", snapshot: "TakeSnapshot"
) -> None:
    p, g = weight(3, 4), noise(3, 4)
    harness = direct([p])
    opt = TNT([p], likelihood=harness.likelihood)
    p.grad = g
    before = snapshot([p], opt)
    with raising(RuntimeError, "finite|nan"):
        harness.iterate(opt, [g], [spoiled(noise(3, 4), math.nan)])
    before.assert_unchanged()


def test_caught_failure_does_not_poison_the_next_observation(direct: "Direct") -> None:
    """After a non-finite first observation the next good one is the first, not NaN + good."""
    p, good = weight(3, 4), noise(3, 4)
    harness = direct([p])
    opt = TNT([p], likelihood=harness.likelihood)
    with raising(RuntimeError, "finite|nan"):
        harness.iterate(opt, [noise(3, 4)], [spoiled(noise(3, 4), math.nan)])
    harness.iterate(opt, [noise(3, 4)], [good])
    for i in range(2):
        close(opt.state[p]["stats"][i], contraction(good, i))


def failing_inverse(p: nn.Parameter, opt: TNT) -> list[Tensor]:
    """Make the statistics negative definite; returns what they were."""
    held = [s.clone() for s in opt.state[p]["stats"]]
    for s in opt.state[p]["stats"]:
        s.copy_(-torch.eye(len(s), dtype=s.dtype))
    return held


def test_failed_inverse_keeps_the_previous_one(direct: "Direct") -> None:
    p = weight(4, 4)
    harness = direct([p])
    opt = TNT(
        [p], lr=0.1, momentum=0.0, stat_interval=100, inverse_interval=1,
        likelihood=harness.likelihood,
    )  # fmt: skip
    harness.iterate(opt, [noise(4, 4)], [noise(4, 4)])
    held = failing_inverse(p, opt)
    a, b = (f.clone() for f in opt.state[p]["factors"])
    for count in range(1, 5):
        start, g = p.detach().clone(), noise(4, 4)
        with pytest.warns(RuntimeWarning):
            harness.iterate(opt, [g])
        assert torch.equal(a, opt.state[p]["factors"][0])
        assert torch.equal(b, opt.state[p]["factors"][1])
        close(start - p.detach(), 0.1 * (a @ g @ b))
        assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": count}
    for s, good in zip(opt.state[p]["stats"], held, strict=True):
        s.copy_(good)
    harness.iterate(opt, [noise(4, 4)])  # recovered: the row is broken
    failing_inverse(p, opt)
    for _ in range(4):
        with pytest.warns(RuntimeWarning):
            harness.iterate(opt, [noise(4, 4)])
    with raising(RuntimeError, "damping|inverse"):
        harness.iterate(opt, [noise(4, 4)])


def test_first_inverse_failing_raises_and_changes_nothing(
    direct: "Direct", snapshot: "TakeSnapshot"
) -> None:
    """Damping 0 and a column that never has a gradient: S_2 is exactly singular."""
    p, sampled = weight(3, 4), noise(3, 4)
    sampled[:, 1] = 0.0
    harness = direct([p])
    opt = TNT([p], damping=0.0, likelihood=harness.likelihood)
    p.grad = noise(3, 4)
    before = snapshot([p], opt)
    with raising(RuntimeError, "damping"):
        harness.iterate(opt, [p.grad], [sampled])
    before.assert_unchanged()


def test_failure_of_one_parameter_leaves_the_others_fresh(direct: "Direct") -> None:
    """Only the parameter whose inverse failed keeps its old one."""
    p, q = weight(4, 4), weight(3, 5)
    harness = direct([p, q])
    opt = TNT([p, q], stat_interval=1, inverse_interval=1, likelihood=harness.likelihood)
    harness.iterate(opt, [noise(4, 4), noise(3, 5)], [noise(4, 4), noise(3, 5)])
    failing_inverse(p, opt)
    for s in opt.state[p]["stats"]:
        s.mul_(1e3)  # the next observation cannot make it definite again
    old_p, old_q = (opt.state[x]["factors"][0].clone() for x in (p, q))
    with pytest.warns(RuntimeWarning):
        harness.iterate(opt, [noise(4, 4), noise(3, 5)], [noise(4, 4), noise(3, 5)])
    assert torch.equal(old_p, opt.state[p]["factors"][0])
    assert not torch.equal(old_q, opt.state[q]["factors"][0])
