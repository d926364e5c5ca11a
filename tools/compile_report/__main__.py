"""`python -m tools.compile_report`: what the compilers make of every GPU kernel.

Compiles every Triton kernel in every class that the launchers choose, for several architectures,
on a machine that needs no GPU. Nothing runs, and nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, write_json
from tnt_kernels.benchmark.tables import table
from tools.compile_report.expectations import EXPECTATIONS, RECORDED, SUPPORTED, misses
from tools.compile_report.launches import kernels
from tools.compile_report.machine_code import Compiled, compile_all

UNNAMED = ("num_warps",)  # has a column of its own


def class_of(settings: Mapping[str, Any]) -> str:
    """The constants of a class as the tables name them.

    >>> class_of({"ELEMENT": "fp32", "VECTOR": 4, "UPDATE": True, "LAST": False, "num_warps": 4})
    'ELEMENT fp32, VECTOR 4, UPDATE'
    """
    kept = {k: v for k, v in settings.items() if k not in UNNAMED and v is not False}
    return ", ".join(name if value is True else f"{name} {value}" for name, value in kept.items())


def loads_of(c: Compiled) -> str:
    """The widths in bytes of every load in a loop, by branch."""
    places: dict[str, list[str]] = {}
    for name, widths in c.loads.items():
        place, _, what = name.rpartition(": ")
        places.setdefault(place, []).append(f"{what} {'/'.join(map(str, widths))}")
    return "; ".join(f"{p}: {', '.join(w)}" if p else ", ".join(w) for p, w in places.items())


def _cells(c: Compiled) -> list[str]:
    if c.error:
        return [*["-"] * 6, f"**does not compile**: {c.error}"]
    spilled = (c.stack, c.spill_loads, c.spill_stores)
    return [
        str(c.registers),
        "0" if not any(spilled) else f"**{c.stack}, {c.spill_loads}/{c.spill_stores}**",
        str(c.shared) + (f" + {c.tensor_memory} columns" if c.tensor_memory else ""),
        str(c.settings["num_warps"]),
        ", ".join(sorted(set(c.products.values()))),
        "; ".join(f"{p.instructions}, {p.products}, {p.waits}" for p in c.loops),
        loads_of(c),
    ]


def _rows(entries: Sequence[Compiled]) -> list[list[str]]:
    """One row for each class; cells that differ between architectures have one value for each."""
    classes: dict[tuple[str, str], list[Compiled]] = {}
    for c in entries:
        classes.setdefault((c.kernel, class_of(c.settings)), []).append(c)
    rows = []
    for (kernel, name), group in sorted(classes.items()):
        columns = zip(*map(_cells, group), strict=True)
        cells = [c[0] if len(set(c)) == 1 else " / ".join(c) for c in columns]
        rows.append([kernel, name, ", ".join(f"sm_{c.capability}" for c in group), *cells])
    return rows


def page(record: Mapping[str, Any], entries: Sequence[Compiled]) -> str:
    """The page: rules and who breaks them, one row for each class."""
    source = record["provenance"]
    missed = record["missed"]
    counts = [
        (rule, sum(m["expectation"] == rule for m in missed)) for rule in (*EXPECTATIONS, RECORDED)
    ]
    header = ["kernel", "class", "for", "registers", "stack, LDL/STL", "shared memory, bytes"]
    header += ["warps", "product", "loops with products or waits: instructions, products, waits"]
    header += ["loads in loops, bytes"]
    lines = [
        "# What the compilers make of the GPU kernels",
        "",
        f"Commit {(source['commit'] or 'unknown')[:12]}{' with changes' if source['dirty'] else ''}"
        f", {source['date'][:10]}, Triton {source['versions']['triton']}; `{source['command']}`. "
        f"{len(entries)} classes, compiled without a GPU: nothing was run, nothing here is a time.",
        "",
        *table(("rule", "broken by"), counts),
        *(f"- `{m['kernel']}` ({class_of(m['settings'])}), sm_{m['capability']}: {m['what']}"
          for m in missed),
        "",
        *table(header, _rows(entries)),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def main(
    out: Annotated[Path, typer.Option(help="the record; its page next to it")] = Path(
        "results/compile_report.json"
    ),
    main: Annotated[
        bool, typer.Option("--main", help="fewer dtypes, sm_80 and sm_90 only")
    ] = False,
) -> None:
    """Compile every GPU kernel and check the result; exit status 1 if a kernel breaks a rule."""
    check_writable(out)
    origin = provenance()
    capabilities = SUPPORTED[:2] if main else SUPPORTED
    try:
        entries = compile_all(capabilities, main_only=main)
    except RuntimeError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    found = misses(entries, kernels())
    record = {
        "provenance": origin,
        "missed": [asdict(m) for m in found],
        "rows": [asdict(c) for c in entries],
    }
    write_json(out, record)
    out.with_suffix(".md").write_text(page(record, entries), encoding="utf-8")
    for m in found:
        typer.echo(f"{m.kernel} ({class_of(m.settings)}), sm_{m.capability}: {m.what}", err=True)
    typer.echo(f"{len(entries)} classes, {len(found)} broken rules: {out.with_suffix('.md')}")
    raise typer.Exit(int(bool(found)))


if __name__ == "__main__":
    typer.run(main)
