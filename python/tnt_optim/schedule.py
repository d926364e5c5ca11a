"""What is due at a step: statistics every T1 steps, factors every T2, both more often at first."""

import functools
from collections.abc import Callable, Mapping, Sequence, Set

from torch import Tensor

from tnt_optim.modes import Group, Settings, State, States, is_plain
from tnt_optim.options import check_settings
from tnt_optim.state import has_statistics


@functools.cache
def _warmup_steps(name: str, interval: int, warmup: int) -> tuple[frozenset[int], int]:
    """The steps with a refresh in a warm-up, and the first such step after it.

    An interval that starts at step s is 1 + (interval - 1) s / warmup, rounded down. The settings
    are checked here, too: ``observe`` and forward hooks come before ``step``, which checks all.

    >>> steps, after = _warmup_steps("stat_interval", 4, 9)
    >>> sorted(steps), after
    ([0, 1, 2, 3, 5, 7], 10)
    """
    check_settings({name: interval, "interval_warmup": warmup})
    steps, step = set(), 0
    while step < warmup:
        steps.add(step)
        step += 1 + (interval - 1) * step // warmup
    return frozenset(steps), step


def is_due(group: Settings, interval: str) -> bool:
    """Whether a refresh with a group's "stat_interval" or "inverse_interval" is due at its step."""
    try:
        steps, after = _warmup_steps(interval, group[interval], group["interval_warmup"])
    except TypeError:  # a list, for example, has no hash
        check_settings(group)
        raise
    t: int = group["step"]
    return t in steps or (t >= after and (t - after) % group[interval] == 0)


def factors_due(
    group: Settings, states: Mapping[Tensor, State], refreshed: Set[Tensor]
) -> list[Tensor]:
    """The group's parameters in ``states`` whose factors are due at its step.

    Without a warm-up, factors follow the ``refreshed`` statistics during their first T2 steps.
    """
    t, scheduled = group["step"], is_due(group, "inverse_interval")
    young = group["inverse_interval"] if t >= group["interval_warmup"] else 0
    return [
        p
        for p in (group["params"] if scheduled or refreshed else [])
        if (scheduled or p in refreshed) and p in states
        if scheduled or t - states[p]["first_step"] < young
    ]


def statistics_due(
    groups: Sequence[Group], states: States, waits_for: Callable[..., bool]
) -> list[Tensor]:
    """Parameters whose statistics are due, and those that wait for an output to reach them.

    ``waits_for`` is that of the source.
    """
    return [
        p
        for group in groups
        for scheduled in [is_due(group, "stat_interval")]
        for p in group["params"]
        if not is_plain(p, group)
        if scheduled or waits_for(p, is_new=not has_statistics(states.get(p, {})))
    ]
