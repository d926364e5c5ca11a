"""The benchmark's page: a pure function of its record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.precision.contract import OUTCOMES
from bench.precision.sampled import SCALES
from tools.measuring.tables import table

Run = Mapping[str, Any]


def page(record: Mapping[str, Any]) -> str:
    """Everything measured, in Markdown."""
    protocol = record["protocol"]
    parts: dict[str, list[Run]] = {}
    for run in record["runs"]:
        parts.setdefault(run["key"]["part"], []).append(run)
    lines = ["# Precision, resuming, contract", ""]
    for name, section in _SECTIONS.items():
        if name in parts:
            lines += section(parts[name], protocol)
    return "\n".join(lines)


def _training(runs: Sequence[Run], protocol: Mapping[str, Any]) -> list[str]:
    settings, (train, held) = protocol["training"], protocol["examples"]
    ways = list(dict.fromkeys(run["key"]["way"] for run in runs))
    seeds = len({run["key"]["seed"] for run in runs})
    header = ["", "training loss", "validation error, %", "moved by the last step, %"]
    return [
        "## Training in each precision",
        "",
        f"scikit-learn's digits, {train} for training and {held} for validation; two convolutions "
        f"and two linear layers; {protocol['steps']} steps of TNT on batches of "
        f"{protocol['batch']}, grafted, with relative damping, the learning rate falling from "
        f"{settings['first_lr']:g} to {settings['last_lr']:g} by equal factors. Medians and "
        f"quartiles over {_counted(seeds, 'seed')}; loss and error are those of the final "
        "parameters, computed in float32; moved: the share of the parameters' numbers that the "
        "last step changed.",
        "",
        *table(header, [_way(way, [r for r in runs if r["key"]["way"] == way]) for way in ways]),
    ]


def _way(way: str, runs: Sequence[Run]) -> list[str]:
    return [
        way,
        _spread([run["training_loss"] for run in runs], "{:.5f}"),
        _spread([100 * run["validation_error"] for run in runs], "{:.2f}"),
        _spread([100 * run["last_step_moved"] for run in runs], "{:.1f}"),
    ]


def _spread(found: Sequence[float | None], form: str) -> str:
    """Median, and quartiles where there are several values."""
    values = [value for value in found if value is not None]
    if len(values) < len(found):  # as JSON has it
        return "not finite"
    middle = form.format(statistics.median(values))
    if len(values) < 2:
        return middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle} ({form.format(low)} to {form.format(high)})"


def _sampled(runs: Sequence[Run], protocol: Mapping[str, Any]) -> list[str]:
    width = protocol["sampled"]["width"]
    header = ["classes", "rows", *(f"sample_scale: {scale}" for scale in SCALES)]
    rows = sorted(runs, key=lambda run: (run["key"]["classes"], run["key"]["rows"]))
    return [
        "## The sampled pass in float16",
        "",
        f"The trace of a parameter's statistics under autocast in float16, as a multiple of that "
        "in float32 at the same sampled labels: the smallest and the largest of the four "
        f"parameters of two linear layers of width {width}, the second of deviation "
        f"{protocol['sampled']['head_deviation']:g}.",
        "",
        *table(header, [
            [str(run["key"]["classes"]), str(run["key"]["rows"]),
             *(_ratios(run["ratios"][scale]) for scale in SCALES)]
            for run in rows
        ]),
    ]  # fmt: skip


def _ratios(ratios: Mapping[str, float | None] | str) -> str:
    if isinstance(ratios, str):
        return "PreconditionerError"
    known = [ratio for ratio in ratios.values() if ratio is not None]
    if len(known) < len(ratios):
        return "not finite"
    return f"{min(known):.4f} to {max(known):.4f}"


def _resume(runs: Sequence[Run], protocol: Mapping[str, Any]) -> list[str]:
    optimizers = _names(run["key"]["optimizer"] for run in runs)
    precisions = _names(run["key"]["precision"] for run in runs)
    found = {(run["key"]["optimizer"], run["key"]["precision"]): run for run in runs}
    steps = protocol["resume_steps"]
    return [
        "## Resuming",
        "",
        f"{2 * steps} steps, beside {steps}, state_dict through torch.save and "
        f"torch.load(weights_only=True) into a new model and a new optimizer, and {steps} more: "
        "how many numbers of the parameters, and of the optimizer's state, have other bits at the "
        "end.",
        "",
        *table(["", *precisions], [
            [name, *(_differences(found.get((name, precision))) for precision in precisions)]
            for name in optimizers
        ]),
    ]  # fmt: skip


def _differences(run: Run | None) -> str:
    if run is None:
        return ""
    return (
        f"{run['parameters_differ']:,} of {run['of_parameters']:,}; "
        f"{run['state_differs']:,} of {run['of_state']:,}"
    )


def _contract(runs: Sequence[Run], protocol: Mapping[str, Any]) -> list[str]:
    lines = ["## PyTorch's optimizer contract", ""]
    for run in runs:
        chosen = run["key"]["expression"]
        lines += [
            f"Tests of {' and '.join(f'`{name}`' for name in run['key']['files'])}"
            f"{f', those that match `{chosen}`' if chosen else ''}.",
            "",
        ]
        counts = {**run["tests"], "all": _total(run["tests"].values())}
        rows = [[name, *(str(c[outcome]) for outcome in OUTCOMES)] for name, c in counts.items()]
        lines += table(["", *OUTCOMES], rows)
    return lines


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    known = list(counts)
    return {outcome: sum(count[outcome] for count in known) for outcome in OUTCOMES}


def _names(found: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(found))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_SECTIONS: dict[str, Callable[[Sequence[Run], Mapping[str, Any]], list[str]]] = {
    "training": _training,
    "sampled": _sampled,
    "resume": _resume,
    "contract": _contract,
}
