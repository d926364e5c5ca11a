"""The parts of the report's page. Pure functions of the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.gpu.ceilings import CEILING_OF
from bench.gpu.record import (
    MEASURING,
    STAGES,
    Line,
    Record,
    lines_of,
    origins,
    rates,
    ratio,
)
from bench.gpu.targets import TARGETS
from bench.kernels.targets import verdict
from bench.kernels.timing import OURS
from tools.measuring.tables import table, times

PRECISIONS = ("highest", "high")
TITLES = {
    "gram_ema_": "All statistics of the set refreshed once",
    "preconditioned_step_": "Momentum, products, decay and update of all parameters",
    "damped_inverse": "All inverses of the set remade once, damping 0.1",
    "mode_products": "Every tensor multiplied by its factors, into new tensors",
    "inverse_root": "All roots of the set, 1/2k as in Shampoo, damping 0.1",
}
_NOT_SAID = "?"


def microseconds(seconds: float) -> str:
    """Three significant digits, all digits before the point.

    >>> microseconds(1.23456e-5), microseconds(2.34567e-3)
    ('12.3', '2346')
    """
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def header_section(record: Record) -> list[str]:
    """Where the numbers come from, how they were taken, what served."""
    found = origins(record)
    first = next(iter(found.values()))
    gpu, smi = first["gpu"] or {}, first["nvidia_smi"] or {}
    versions = first["versions"]
    commits = {f"commit of {stage}": _commit(origin) for stage, origin in found.items()}
    machine = [
        ("GPU", str(gpu.get("name", "none"))),
        ("GPU memory", _gigabytes(gpu)),
        ("driver", smi.get("driver_version", _NOT_SAID)),
        ("power limit", smi.get("power.limit", _NOT_SAID)),
        ("clocks before, SM / memory", _pair(smi, "clocks.sm", "clocks.mem")),
        ("highest clocks, SM / memory", _pair(smi, "clocks.max.sm", "clocks.max.mem")),
        ("in use before, by anyone", smi.get("utilization.gpu", _NOT_SAID)),
        ("CPU", f"{first['machine']['cpu']}, {first['machine']['cores']} cores"),
        *((name, str(versions.get(name))) for name in ("torch", "cuda", "triton", "python")),
        ("date", str(first["date"])),
        *({"commit": _commit(first)} if len(set(commits.values())) == 1 else commits).items(),
    ]
    served = [(name, row["cuda"]) for name, row in first["backends"]["ops"].items()]
    protocol = [f"- {name}: {text}" for name, text in record["protocol"].items()]
    return [
        "# On a GPU",
        "",
        *table(("", ""), machine),
        "How it was measured:",
        "",
        *protocol,
        "",
        "Ratios are the baseline's median over ours, bold where the baseline wins. Shares of the "
        "ceilings count every input and output once and useful flops (one triangle, d^3 for an "
        "inverse), over the graph's time where there is one; in float32 3xTF32 can pass 100 %.",
        "",
        *table(("operator", "served by"), served),
    ]


def targets_section(record: Record) -> list[str]:
    """Every ratio to reach beside those measured; reached where every precision reaches it."""
    measured = {
        (line["op"], line.get("kind_of_step", ""), line["set"], line["precision"]): line
        for stage in ("kernels", "step")
        for line in lines_of(record, stage, stage)
    }
    rows = []
    for (op, kind, baseline), sets in TARGETS.items():
        for name, wanted in sets.items():
            row = [f"`{op}`" + (f", {kind}" if kind else ""), name, baseline, f"{wanted:g}"]
            eager = []
            for setting in PRECISIONS:
                line = measured.get((op, kind, name, setting), {})
                for how in ("eager", "graph"):
                    value = ratio(line, baseline, OURS, how)
                    row.append("" if value is None else times(value))
                    eager += [value] if how == "eager" and value is not None else []
            row.append(verdict(min(eager), wanted) if eager else "not measured")
            rows.append(row)
    header = ["", "set", "over", "to reach [E]"]
    header += [f"{setting}{how}" for setting in PRECISIONS for how in ("", ", as graphs")]
    return [
        "## Ratios to reach",
        "",
        "[E]: estimated before anything had run on a GPU, for one H200. Reached is what eager "
        "calls reach in both precisions.",
        "",
        *table([*header, ""], rows),
    ]


def ceilings_section(record: Record) -> list[str]:
    """The measured ceilings."""
    found = rates(record)
    if not found:
        return []
    names = {"float32": "float32 products", "tf32": "TF32 products", "bf16": "bf16 products"}
    rows = [("copy, read and written", f"{found['copy'] / 1e12:.2f} TB/s")]
    rows += [(text, f"{found[name] / 1e12:.1f} TFLOP/s") for name, text in names.items()]
    return ["## Measured ceilings", "", *table(("large, best of two measurements", ""), rows)]


def operator_sections(record: Record) -> list[str]:
    """One table for each operator."""
    lines = lines_of(record, "kernels", "kernels")
    found, launches = rates(record), lines_of(record, "kernels", "launches")
    result: list[str] = []
    for op, title in TITLES.items():
        own = [line for line in lines if line["op"] == op]
        if own:
            result += [f"## `{op}`", "", f"{title}.", "", *_operator_table(own, found, launches)]
            result += _notes(own)
    return result


def _operator_table(lines: list[Line], found: dict[str, float], launches: list[Line]) -> list[str]:
    baselines = [name for name in lines[0]["eager"] if name != OURS]
    header = ["set", "precision", "ours, us", "(quartiles)", "as a graph, us"]
    for name in baselines:
        header += [f"{name}, us", "over ours", "as graphs"]
    header += ["of a copy", "of large products", "error: ours", "worst other", "launches"]
    rows = []
    for line in lines:
        ours, graph = line["eager"][OURS], line["graph"].get(OURS)
        row = [line["set"], line["precision"], microseconds(ours["median"])]
        row.append(" to ".join(microseconds(q) for q in ours["quartiles"]))
        row.append("none" if graph is None else microseconds(graph["median"]))
        for name in baselines:
            row.append(microseconds(line["eager"][name]["median"]))
            row += [_times(ratio(line, name, OURS, how)) for how in ("eager", "graph")]
        seconds = (graph or ours)["median"]
        work = line["work"]
        row.append(_share(work["bytes"] / seconds, found.get("copy")))
        product = found.get(CEILING_OF[line["precision"]])
        row.append(_share(work["useful_flops"] / seconds, product))
        others = [error for name, error in line["errors"].items() if name != OURS]
        row += [f"{line['errors'][OURS]:.0e}", f"{max(others):.0e}" if others else ""]
        row.append(_launches(line, launches))
        rows.append(row)
    return table(header, rows)


def step_section(record: Record) -> list[str]:
    """The optimizer's step, all kinds, sets and precisions."""
    lines = lines_of(record, "step", "step")
    if not lines:
        return []
    others = list(dict.fromkeys(name for line in lines for name in line["eager"] if name != OURS))
    header = ["set", "precision", "step", "TNT, us"]
    header += [cell for name in others for cell in (f"{name}, us", "over TNT")]
    rows = []
    for line in sorted(lines, key=lambda line: (line["set"], line["precision"] != "highest")):
        row = [line["set"], line["precision"], line["kind_of_step"]]
        row.append(microseconds(line["eager"][OURS]["median"]))
        for name in others:
            row.append(microseconds(line["eager"][name]["median"]))
            row.append(_times(ratio(line, name, OURS)))
        rows.append(row)
    return [
        "## The optimizer's step",
        "",
        "Time of one step, forward and backward left out; with T1 and T2 the average over a cycle "
        "of 20. The gradients at hand also serve for the statistics. Plain torch is einsum + "
        "lerp_, tensordot + foreach and linalg.inv.",
        "",
        *table(header, rows),
    ]


def training_section(record: Record) -> list[str]:
    """The MNIST autoencoder."""
    lines = lines_of(record, "training", "training")
    if not lines:
        return []
    rows = []
    for line in lines:
        losses = [epoch["smoothed_loss"] for epoch in line["epochs"]]
        shown = ", ".join("diverged" if loss is None else f"{loss:.2f}" for loss in losses)
        warm = line["warm_start_seconds"]
        row = (line["optimizer"], line["precision"], shown, f"{line['seconds_per_epoch']:.3f}")
        rows.append((*row, "" if warm is None else f"{warm:.2f}"))
    header = (
        "",
        "precision",
        "smoothed loss after each epoch",
        "seconds an epoch",
        "warm start, s",
    )
    return ["## Training the MNIST autoencoder", "", *table(header, rows)]


def not_measured_section(record: Record) -> list[str]:
    """What failed, and what was not run, with the reasons; nothing where there is nothing."""
    rows = []
    for stage in MEASURING:
        for line in record[stage]:
            if line["kind"] in ("failed", "not run"):
                parts = (line.get("op"), line.get("optimizer"), line.get("set"))
                what = " ".join(filter(None, parts))
                rows.append((stage, what, line["precision"], line["kind"], line["why"]))
    if not rows:
        return []
    return [
        "## Not measured",
        "",
        *table(("stage", "what", "precision", "", "why"), map(_without_bars, rows)),
    ]


def checks_section(record: Record) -> list[str]:
    """Build, tests, sanitizer, and how the stages ended."""
    rows = [
        (line["group"], str(line["passed"]), str(line["failed"]), str(line["skipped"]))
        for line in lines_of(record, "tests", "tests")
    ]
    header: tuple[str, ...] = ("", "passed", "failed", "skipped")
    result = ["## Tests on the GPU", "", *table(header, rows)] if rows else []
    for line in lines_of(record, "tests", "tests"):
        result += [f"- failed: `{name}`: {said}" for name, said in line["failures"]]
        if line["status"] is None:
            result.append(f"- {line['group']} ran out of time")
    for line in lines_of(record, "tests", "not run"):
        result.append(f"- left out: {line['file']}: {line['why']}")
    for line in lines_of(record, "sanitizer", "sanitizer"):
        result.append(f"- compute-sanitizer, {line['tool']}: {line['result']}. {line['summary']}")
    ended = [
        (o["stage"], o["status"], f"{o['seconds']:.0f}", o["message"])
        for o in record["outcomes"]
        if o["stage"] in STAGES
    ]
    if ended:
        header = ("stage", "", "seconds", "")
        result += ["", "## Stages of the last run", ""]
        result += table(header, map(_without_bars, ended))
    return result


def _notes(lines: Iterable[Line]) -> list[str]:
    """What is to be said once for all rows."""
    said: dict[str, None] = {}  # in the order of their first appearance
    for line in lines:
        for note in filter(None, line["note"].split("; ")):
            said[f"{line['set']}: {note}."] = None
        for name, why in line["no_graph"].items():
            said[f"{name} has no graph: {why}."] = None
    return [f"- {note}" for note in said] + ([""] if said else [])


def _launches(line: Line, launches: list[Line]) -> str:
    same = [entry for entry in launches if (entry["op"], entry["set"]) == (line["op"], line["set"])]
    return ", ".join(f"{e['candidate']} {e['kernels'] + e['copies']}" for e in same)


def _times(value: float | None) -> str:
    return "" if value is None else times(value)


def _share(rate: float, ceiling: float | None) -> str:
    return "" if not ceiling or not rate else f"{100 * rate / ceiling:.0f} %"


def _commit(origin: Line) -> str:
    return (origin["commit"] or "unknown") + (" with changes" if origin["dirty"] else "")


def _gigabytes(gpu: dict[str, Any]) -> str:
    size = gpu.get("memory_bytes")
    return _NOT_SAID if size is None else f"{size / 2**30:.0f} GiB"


def _pair(smi: dict[str, str], first: str, second: str) -> str:
    return f"{smi.get(first, _NOT_SAID)} / {smi.get(second, _NOT_SAID)}"


def _without_bars(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cell.replace("|", "/") for cell in row)
