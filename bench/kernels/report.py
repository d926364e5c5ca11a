"""The record of a run as a Markdown page: every candidate, every ratio, misses said plainly.

``python -m bench.kernels.report DIR`` makes ``kernels.md`` and the plots again from DIR's JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kernels.complexity_report import complexity_section
from bench.kernels.targets import CYCLE, TARGETS, ratio, verdict
from bench.kernels.timing import OURS
from tools.measuring.tables import disturbance, milliseconds, table, times

Benchmark = dict[str, Any]

# What a reader must know beside each operator's table.
_TITLES = {
    "gram_ema_": "All statistics of the set refreshed once",
    "damped_inverse": "All inverses of the set remade once, damping 0.1",
    "inverse_root": "All roots of the set, 1/2k as in Shampoo, damping 0.1",
    "mode_products": "Every tensor multiplied by its factors, into new tensors",
    "preconditioned_step_": "Momentum, products, decay and update of all parameters",
}
_NOT_RUN = {
    "inverse_root": "Not on the sets with modes of 2000 and more, nor on gpt2: one root costs some "
    "hundred d³, a round there would take minutes. vgg16_conv is vgg16 without its linear layers."
}


def with_cycles(benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """Adds a cycle of 20 steps where only its parts were timed: 19 without inverses, 1 with."""
    steps = [b for b in benchmarks if b["op"] == "TNT.step"]
    by_kind = {(b["set"], b["kind"]): b for b in steps}
    added = []
    for name in dict.fromkeys(b["set"] for b in steps):
        plain = by_kind.get((name, "statistics due"))
        full = by_kind.get((name, "statistics and inverses due"))
        if (name, CYCLE) in by_kind or plain is None or full is None:
            continue
        medians = {
            c: {"median": (19 * plain["candidates"][c]["median"] + values["median"]) / 20}
            for c, values in full["candidates"].items()
        }
        note = "; ".join(filter(None, (full["note"], "added up from the two kinds of steps")))
        added.append({**full, "kind": CYCLE, "candidates": medians, "note": note})
    return [*benchmarks, *added]


def targets_section(benchmarks: Sequence[Benchmark]) -> list[str]:
    """Every ratio to reach, beside the one measured and the one that the machine would allow."""
    measured = {(b["op"], b["kind"], b["set"]): b for b in benchmarks}
    rows = []
    for (op, kind, baseline), sets in TARGETS.items():
        for name, wanted in sets.items():
            benchmark = measured.get((op, kind, name))
            label = f"`{op}`" + (f", {kind}" if kind else "")
            if benchmark is None:
                rows.append((label, name, baseline, f"{wanted:g}", "", "", "not run"))
            else:
                got = ratio(benchmark, baseline)
                most = benchmark["candidates"][baseline]["median"] / benchmark["limit_seconds"]
                said = (times(got), times(most), verdict(got, wanted))
                rows.append((label, name, baseline, f"{wanted:g}", *said))
    header = ("", "set", "over", "to reach", "measured", "at the machine's limit", "")
    return [
        "## Ratios to reach",
        "",
        "At the machine's limit: what the ratio would be if ours ran at the measured limit. The "
        "targets were set where torch's own products ran at half the speed of OpenBLAS's.",
        "",
        *table(header, rows),
    ]


def operator_section(op: str, benchmarks: Sequence[Benchmark]) -> list[str]:
    """One operator on every set it was timed on; nothing where there is none."""
    if not benchmarks:
        return []
    baselines = [name for name in benchmarks[0]["candidates"] if name != OURS]
    header = ["set", "ours, ms", "(quartiles)"]
    header += [cell for name in baselines for cell in (f"{name}, ms", "over ours")]
    header += ["GF/s useful (effective)", "GB/s", "of the limit", "rounds"]
    rows = []
    for benchmark in benchmarks:
        ours = benchmark["candidates"][OURS]
        row = [benchmark["set"] + _footnote(benchmark), milliseconds(ours["median"])]
        row.append(" to ".join(milliseconds(quartile) for quartile in ours["quartiles"]))
        for name in baselines:
            row += [milliseconds(benchmark["candidates"][name]["median"])]
            row += [times(ratio(benchmark, name))]
        row += [
            f"{ours['useful_gflops']:.1f} ({ours['effective_gflops']:.1f})",
            f"{ours['gbytes']:.2f}",
            f"{100 * ours['share_of_limit']:.0f} % ({benchmark['limit']})",
            str(len(ours["samples"])),
        ]
        rows.append(row)
    lines = [f"## `{op}`", "", f"{_TITLES[op]}.", "", *table(header, rows)]
    return [*lines, *_notes(benchmarks), *([_NOT_RUN[op], ""] if op in _NOT_RUN else [])]


def step_section(benchmarks: Sequence[Benchmark]) -> list[str]:
    """The optimizer's step, all kinds and sets."""
    if not benchmarks:
        return []
    others = list(dict.fromkeys(c for b in benchmarks for c in b["candidates"] if c != OURS))
    header = ["set", "step", "TNT, ms"]
    header += [cell for name in others for cell in (f"{name}, ms", "over TNT")]
    rows = []
    for benchmark in sorted(benchmarks, key=lambda b: str(b["set"])):
        row = [benchmark["set"] + _footnote(benchmark), benchmark["kind"]]
        row.append(milliseconds(benchmark["candidates"][OURS]["median"]))
        for name in others:
            if name in benchmark["candidates"]:
                row.append(milliseconds(benchmark["candidates"][name]["median"]))
                row.append(times(ratio(benchmark, name)))
            else:
                row += ["", ""]
        rows.append(row)
    return [
        "## The optimizer's step",
        "",
        "Time of one step, forward and backward left out; with T1 and T2 the average over a cycle "
        "of 20. The gradients at hand also serve for the statistics: with sampled labels the step "
        "does the same to another gradient, and `observe` adds a second backward. Plain torch is "
        "einsum + lerp_, tensordot + foreach and linalg.inv; AdamW and SGD are torch's fused ones.",
        "",
        *table(header, rows),
        *_notes(benchmarks),
    ]


def header_section(record: dict[str, Any]) -> list[str]:
    """Where the numbers come from, and the machine's limits."""
    origin, limits, end = record["provenance"], record["limits"], record["limits_at_the_end"]
    machine, versions = origin["machine"], origin["versions"]
    commit = (origin["commit"] or "unknown")[:12] + (" with changes" if origin["dirty"] else "")
    rows = [
        (name, *(f"{source[key] / 1e9:.1f}" for source in (limits, end)))
        for name, key in (
            ("sgemm, GF/s", "sgemm"),
            ("ssyrk, useful GF/s (effective is twice that)", "ssyrk"),
            ("copy, GB/s read and written", "copy"),
            ("torch's own sgemm, GF/s", "torch_sgemm"),
        )
    ]
    return [
        "# Kernel benchmarks",
        "",
        f"Commit {commit}, {origin['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"{origin['threads']['torch']} threads, torch {versions['torch']}, float32; "
        f"`{origin['command']}`.{disturbance(record['protocol'])}",
        "",
        "Medians of candidates that alternate in one process, each checked against the reference "
        "before it is timed; ratios are the baseline's median over ours, bold where the baseline "
        "wins. Useful flops use symmetry (one triangle, d³ for an inverse), effective ones do not; "
        "bytes count every input and output once. The limit is the later of the useful flops at "
        "the BLAS's rate and the bytes at that of a copy, the better of two measurements (small "
        "sets stay in a cache and can be faster than a copy).",
        "",
        *table((f"{limits['blas']}, n = {limits['size']}", "at the start", "at the end"), rows),
    ]


def _footnote(benchmark: Benchmark) -> str:
    return " *" if benchmark["note"] else ""


def _notes(benchmarks: Sequence[Benchmark]) -> list[str]:
    """One line for each different note, with the sets it belongs to."""
    sets: dict[str, list[str]] = {}
    for benchmark in benchmarks:
        for part in filter(None, benchmark["note"].split("; ")):
            sets.setdefault(part, []).append(benchmark["set"])
    lines = [f"\\* {', '.join(dict.fromkeys(names))}: {part}." for part, names in sets.items()]
    return [line for text in lines for line in (text, "")]


def page(record: dict[str, Any], complexity: dict[str, Any] | None) -> str:
    """The whole page."""
    benchmarks = with_cycles(record["benchmarks"])
    lines = header_section(record) + targets_section(benchmarks)
    for op in _TITLES:
        lines += operator_section(op, [b for b in benchmarks if b["op"] == op])
    lines += step_section([b for b in benchmarks if b["op"] == "TNT.step"])
    if complexity is not None:
        lines += complexity_section(complexity)
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path) -> Path:
    """Makes the page and the plots of the records in ``folder``.

    Returns:
        The page's path.
    """
    # Here, not above: matplotlib takes a second, and the tables do without.
    from bench.kernels.plots import plot_complexity, plot_ratios, plot_steps

    record = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
    path = folder / "complexity.json"
    complexity = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    benchmarks = with_cycles(record["benchmarks"])
    plot_ratios(benchmarks, folder / "kernels_ratios.png")
    plot_steps(benchmarks, folder / "kernels_step.png")
    if complexity is not None:
        plot_complexity(complexity, folder / "complexity.png")
    result = folder / "kernels.md"
    result.write_text(page(record, complexity), encoding="utf-8")
    return result


def main() -> None:
    """Makes page and plots of the folder on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.report")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("bench/results"))
    print(write(parser.parse_args().folder))


if __name__ == "__main__":
    main()
