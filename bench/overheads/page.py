"""The benchmark's page: every figure on it is computed from the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.kernels.timing import summary
from bench.overheads.steps import NEAREST, NOTHING, PLAIN, steps_of_a_cycle
from tools.measuring.tables import disturbance, milliseconds, table

Run = Mapping[str, Any]
Protocol = Mapping[str, Any]


def page(record: Mapping[str, Any]) -> str:
    """The whole page."""
    protocol, runs = record["protocol"], record["runs"]
    of = {part: [run for run in runs if run["key"]["part"] == part] for part in _SECTIONS}
    lines = [
        "# What comes with a step",
        "",
        "Bare parameters in float32 that hold given gradients, as for the optimizer's step among "
        f"the kernels' benchmarks: {_settings(protocol['settings'])}, "
        'fisher="empirical". Candidates alternate in one process, in an order that rotates from '
        "round to round; a ratio is of two candidates of one round. Given are the median over the "
        "rounds and, in brackets, the quartiles.",
        "",
        "## Goals",
        "",
        *table(("goal", "set", "measured", ""), list(_goals(protocol, runs))),
    ]
    for part, section in _SECTIONS.items():
        if of[part]:
            lines += section(protocol, of[part])
    lines += ["## Where the numbers come from", "", *map(_origin, record["provenance"])]
    for run in runs:
        if disturbance(run):
            lines.append(f"- {run['key']['set']}, {run['key']['part']}:{disturbance(run)}")
    return "\n".join(lines).rstrip() + "\n"


def ratios(run: Run, name: str, base: str) -> list[float]:
    """In each round a candidate's seconds over another's."""
    pairs = zip(run["seconds"][name], run["seconds"][base], strict=True)
    return [own / other for own, other in pairs]


def check_shares(run: Run, cycle: tuple[int, int], within: bool = False) -> list[float]:
    """In each round the share of the checks in a cycle's steps.

    Args:
        run: of the part "guards".
        cycle: T1 and T2.
        within: by the time inside of the checks instead of the difference that they make.
    """
    steps, seconds = steps_of_a_cycle(*cycle), run["seconds"]
    return [
        sum(
            count * (_share(seconds[kind], turn, within) * seconds[kind]["with"][turn])
            for kind, count in steps.items()
        )
        / sum(count * seconds[kind]["with"][turn] for kind, count in steps.items())
        for turn in range(len(seconds[NOTHING.name]["with"]))
    ]


def average_steps(seconds: Mapping[str, Sequence[float]], cycle: tuple[int, int]) -> list[float]:
    """In each round the average step of a cycle, of the seconds of each kind."""
    steps = steps_of_a_cycle(*cycle)
    total = sum(steps.values())
    columns = [[count * value / total for value in seconds[kind]] for kind, count in steps.items()]
    return [sum(parts) for parts in zip(*columns, strict=True)]


def calls_in_steps(run: Run, call: str, cycle: tuple[int, int]) -> list[float]:
    """In each round a call's seconds in average steps of a cycle."""
    pairs = zip(run["seconds"][call], average_steps(run["seconds"], cycle), strict=True)
    return [own / step for own, step in pairs]


def _goals(protocol: Protocol, runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    graft, faults = protocol["goals"]["graft"], protocol["goals"]["faults"]
    run = _find(runs, graft["set"], "companions")
    for name in graft["companions"]:
        goal = f"a step with {name} at most {_limit(graft['at_most'])} over the plain one"
        if run is None:
            yield goal, graft["set"], "not measured", ""
            continue
        more = _median(ratios(run, name, PLAIN)) - 1
        yield goal, graft["set"], f"{_percent(more)} over", _verdict(more, graft["at_most"])
    cycle, every = tuple(faults["cycle"]), faults["every"]
    goal = (
        f"checks, and diagnostics every {every} steps, at most {_limit(faults['at_most'])} of a "
        f"step ({_cycle(cycle)})"
    )
    checks, calls = (_find(runs, faults["set"], part) for part in ("guards", "calls"))
    if checks is None or calls is None:
        yield goal, faults["set"], "not measured", ""
        return
    shares = (
        _median(check_shares(checks, cycle)),
        _median(calls_in_steps(calls, "diagnostics", cycle)) / every,
    )
    measured = f"{_percent(shares[0])} and {_percent(shares[1])}, together {_percent(sum(shares))}"
    yield goal, faults["set"], measured, _verdict(sum(shares), faults["at_most"])


def _companions(protocol: Protocol, runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        for name in run["seconds"]:
            half = name in protocol["companions"] and "dtype" in protocol["companions"][name]
            rows.append(
                (
                    run["key"]["set"],
                    name,
                    *_spread_of_seconds(run["seconds"][name]),
                    "" if name == PLAIN else _spread(ratios(run, name, PLAIN), _times),
                    _spread(ratios(run, name, NEAREST), _times) if half and name != NEAREST else "",
                    str(len(run["seconds"][name])),
                )
            )
    chosen = [
        f"{name}: {_settings(settings)}"
        for name, settings in protocol["companions"].items()
        if name in settings
    ]
    return [
        "## Beside the plain step",
        "",
        f"A step with nothing due: momentum, direction and update. {'; '.join(chosen)}. "
        "Parameters and gradients in bfloat16 where it says so, their state in float32.",
        "",
        *table(
            ("set", "step", "ms", "quartiles", "to plain", f"to {NEAREST}", "rounds"),
            rows,
        ),
        *_notes(runs),
    ]


def _guards(protocol: Protocol, runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        seconds, name = run["seconds"], run["key"]["set"]
        for kind, samples in seconds.items():
            turns = range(len(samples["with"]))
            differences = [_share(samples, turn, False) for turn in turns]
            within = [_share(samples, turn, True) for turn in turns]
            rows.append(_guard_row(name, kind, samples, differences, within))
        for given in protocol["cycles"]:
            cycle = tuple(given)
            averages = {
                which: average_steps({kind: seconds[kind][which] for kind in seconds}, cycle)
                for which in ("with", "without")
            }
            shares = check_shares(run, cycle), check_shares(run, cycle, within=True)
            rows.append(_guard_row(name, f"average of {_cycle(cycle)}", averages, *shares))
    header = ("set", "step", "with, ms", "without, ms", "difference, of the step",
              "inside of them, of the step", "rounds")  # fmt: skip
    return [
        "## Checks for faults",
        "",
        "The optimizer as it is, and the same optimizer with its checks taken out: whether the "
        "gradients for the statistics are finite, the reports of failed statistics and inverses "
        "and their counting, and whether the groups' settings are still right. The operators' own "
        "checks of their arguments stay in both, as do the pivots that a Cholesky factorization "
        "looks at, the few numbers that carry a report, and what finds the parameters that are to "
        "move. The difference is that of two steps of one round, and has their noise; the time "
        "inside of the checks is taken in steps of its own, call by call. With sampled statistics "
        "the check looks at the observed gradients in the same way. An average is put together "
        "from the kinds of steps that a cycle has.",
        "",
        *table(header, rows),
        *_notes(runs),
    ]


def _guard_row(
    name: str,
    kind: str,
    seconds: Mapping[str, Sequence[float]],
    differences: Sequence[float],
    within: Sequence[float],
) -> tuple[str, ...]:
    return (
        name,
        kind,
        *(milliseconds(_median(seconds[which])) for which in ("with", "without")),
        _spread(differences, _percent),
        _spread(within, _percent),
        str(len(differences)),
    )


def _calls(protocol: Protocol, runs: Sequence[Run]) -> list[str]:
    cycles = [tuple(given) for given in protocol["cycles"]]
    every = protocol["goals"]["faults"]["every"]
    rows = [
        (
            run["key"]["set"],
            f"`{call}()`",
            *_spread_of_seconds(run["seconds"][call]),
            _spread(ratios(run, call, NOTHING.name), _digits),
            *(_spread(calls_in_steps(run, call, cycle), _digits) for cycle in cycles),
            *(
                _spread([steps / every for steps in calls_in_steps(run, call, cycle)], _percent)
                for cycle in cycles
            ),
            str(len(run["seconds"][call])),
        )
        for run in runs
        for call in protocol["calls"]
    ]
    header = (
        "set", "call", "ms", "quartiles", "in steps with nothing due",
        *(f"in average steps of {_cycle(cycle)}" for cycle in cycles),
        *(f"every {every} steps, share at {_cycle(cycle)}" for cycle in cycles),
        "rounds",
    )  # fmt: skip
    return [
        "## Diagnostics",
        "",
        "One call, beside steps of each kind in the same rounds.",
        "",
        *table(header, rows),
        *_notes(runs),
    ]


_SECTIONS = {"companions": _companions, "guards": _guards, "calls": _calls}


def _share(samples: Mapping[str, Sequence[float]], turn: int, within: bool) -> float:
    whole = samples["with"][turn]
    return (samples["within"][turn] if within else whole - samples["without"][turn]) / whole


def _find(runs: Sequence[Run], name: str, part: str) -> Run | None:
    return next((run for run in runs if run["key"] == {"set": name, "part": part}), None)


def _median(values: Sequence[float]) -> float:
    return float(summary(values)["median"])


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    found = summary(values)
    low, high = map(form, found["quartiles"])
    return f"{form(found['median'])} ({low} to {high})"


def _spread_of_seconds(seconds: Sequence[float]) -> tuple[str, str]:
    found = summary(seconds)
    return milliseconds(found["median"]), " to ".join(map(milliseconds, found["quartiles"]))


def _times(ratio: float) -> str:
    return f"{ratio:.3f}"


def _digits(number: float) -> str:
    return f"{number:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _limit(share: float) -> str:
    return f"{100 * share:g} %"


def _verdict(value: float, at_most: float) -> str:
    return "met" if value <= at_most else "**not met**"


def _cycle(cycle: Sequence[int]) -> str:
    return f"T1 = {cycle[0]}, T2 = {cycle[1]}"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _notes(runs: Sequence[Run]) -> list[str]:
    noted = [f"{run['key']['set']}: {run['note']}." for run in runs if run["note"]]
    return [line for note in noted for line in (note, "")]


def _origin(origin: Mapping[str, Any]) -> str:
    machine = origin["machine"]
    commit = (origin["commit"] or "unknown")[:12] + (" with changes" if origin["dirty"] else "")
    return (
        f"- Commit {commit}, {origin['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"{origin['threads']['torch']} threads, torch {origin['versions']['torch']}; "
        f"`{origin['command']}`."
    )
