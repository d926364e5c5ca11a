"""When statistics and factors are refreshed: the intervals, and their warm-up."""

import re
from typing import Any

import pytest
import torch
from optimizers import Dictated, factored
from torch import Tensor, nn

from tnt_optim import KFAC, TNT

STEPS = 60


def refreshed(name: str, resume_at: int | None = None, **schedule: Any) -> tuple[list[int], ...]:
    """The steps that change the statistics, and those that change the factors."""

    def made() -> Dictated:
        torch.manual_seed(0)
        return Dictated(name, [nn.Parameter(torch.randn(3, 4))], lr=0.01, **schedule)

    run, rng = made(), torch.Generator().manual_seed(1)
    held: dict[str, list[Tensor]] = {"stats": [], "factors": []}
    steps: dict[str, list[int]] = {"stats": [], "factors": []}
    for step in range(STEPS):
        if step == resume_at:
            saved, run = run.opt.state_dict(), made()
            run.opt.load_state_dict(saved)
        run.step([torch.randn(3, 4, generator=rng)])
        for entry, before in held.items():
            now = [t.clone() for t in run.opt.state[run.params[0]][entry]]
            if not before or not all(map(torch.equal, before, now)):
                steps[entry].append(step)
            held[entry] = now
    return steps["stats"], steps["factors"]


def by_definition(interval: int, warmup: int) -> list[int]:
    """Each interval of the warm-up is its share of the way from 1 to ``interval``."""
    steps, step = [], 0
    while step < STEPS:
        steps.append(step)
        step += 1 + (interval - 1) * min(step, warmup) // max(warmup, 1) if warmup else interval
    return steps


@factored
@pytest.mark.parametrize(("intervals", "warmup"), [((4, 8), 20), ((3, 3), 1), ((5, 20), 200)])
def test_intervals_grow_in_their_warm_up(
    name: str, intervals: tuple[int, int], warmup: int
) -> None:
    schedule = dict(zip(("stat_interval", "inverse_interval"), intervals, strict=True))
    stats, factors = refreshed(name, **schedule, interval_warmup=warmup)
    assert stats == by_definition(intervals[0], warmup)
    # A refresh of the factors changes them only if the statistics have changed since the last one.
    due = by_definition(intervals[1], warmup)
    assert set(factors) <= set(due)
    for earlier, later in zip(due, due[1:], strict=False):
        assert (later in factors) == any(earlier < step <= later for step in stats)


@pytest.mark.parametrize("warmup", [0, 500])
@pytest.mark.parametrize("interval", [0, -3, 2.5, [3], None])
@pytest.mark.parametrize("how", ["observe", "observing", "attach", "KFAC"])
def test_a_bad_interval_is_refused_before_the_step(how: str, interval: Any, warmup: int) -> None:
    """The schedule is asked in the forward pass, too."""
    model, x = nn.Linear(5, 3), torch.randn(6, 5)
    opt: Any = (
        KFAC(model, likelihood="categorical")
        if how == "KFAC"
        else TNT(model.parameters(), likelihood="categorical")
    )
    opt.param_groups[0].update(stat_interval=interval, interval_warmup=warmup)
    if how == "attach":
        opt.attach(model)
    rule = f"stat_interval must be an integer >= 1, got {interval}"
    with pytest.raises(ValueError, match=re.escape(rule)):
        if how == "observing":
            opt.observing  # noqa: B018
        elif how == "observe":
            opt.observe(model(x))
        else:
            model(x)


def test_without_a_warm_up_the_first_factors_follow_the_statistics() -> None:
    stats, factors = refreshed("empirical", stat_interval=2, inverse_interval=10)
    assert stats == list(range(0, STEPS, 2))
    assert factors == [0, 2, 4, 6, 8, *range(10, STEPS, 10)]


def test_a_resumed_warm_up_goes_on() -> None:
    schedule = {"stat_interval": 6, "inverse_interval": 12, "interval_warmup": 40}
    assert refreshed("empirical", resume_at=17, **schedule) == refreshed("empirical", **schedule)
