"""Counts lines by folder, the longest functions, and what one step of TNT calls.

``python -m tools.code_size --out FILE.json`` writes the record. A step is one of `TNT` with a
likelihood on a small convolutional network, in which statistics and factors are due.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional

from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, write_json
from tnt_optim import TNT

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "product": ("tnt_kernels", "python", "csrc", "setup.py"),
    "tests": ("tests",),
    "bench, experiments, tools, examples": ("bench", "experiments", "tools", "examples"),
}
PACKAGES = {"tnt_optim": ROOT / "python" / "tnt_optim", "tnt_kernels": ROOT / "tnt_kernels"}


def sources(*names: str) -> Iterator[Path]:
    """The Python and C++ files in these folders."""
    for name in names:
        path = ROOT / name
        found = [path] if path.is_file() else path.rglob("*")
        yield from (p for p in found if p.suffix in (".py", ".cpp", ".h"))


def sizes() -> dict[str, dict[str, int]]:
    """Files and lines by folder."""
    return {
        label: {
            "files": len(files := sorted(sources(*names))),
            "lines": sum(len(p.read_text(encoding="utf-8").splitlines()) for p in files),
        }
        for label, names in FOLDERS.items()
    }


def longest(kind: type[ast.AST], count: int = 3) -> list[dict[str, Any]]:
    """The longest functions or classes of both packages, with their lines."""
    found: list[dict[str, Any]] = [
        {"name": node.name, "file": str(path.relative_to(ROOT)), "lines": end - node.lineno + 1}
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and isinstance(node, kind)
        if (end := node.end_lineno) is not None
    ]
    return sorted(found, key=lambda entry: -entry["lines"])[:count]


def crossed(run: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Files and functions of each package that a call enters."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    counts = {}
    for package, folder in PACKAGES.items():
        own = [code for code in seen if Path(code.co_filename).resolve().is_relative_to(folder)]
        counts[package] = {
            "files": len({code.co_filename for code in own}),
            # Lambdas and comprehensions belong to the function around them.
            "functions": sum(not code.co_name.startswith("<") for code in own),
        }
    return counts


def step_of_tnt() -> dict[str, Any]:
    """What `observe` and `step` enter at the second step, after everything was made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))
    opt = TNT(model.parameters(), likelihood="categorical")
    found: dict[str, Any] = {}
    for _ in range(2):
        opt.zero_grad()
        output = model(torch.randn(16, 3, 8, 8))
        found["observe"] = crossed(lambda output=output: opt.observe(output))  # type: ignore[misc]
        functional.cross_entropy(output, torch.randint(5, (16,))).backward()
        found["step"] = crossed(opt.step)
    return found


def main(out: Annotated[Path, typer.Option(help="the record, FILE.json")]) -> None:
    """Count, print and write."""
    check_writable(out)
    record = {
        "provenance": provenance(),
        "sizes": sizes(),
        "longest_functions": longest(ast.FunctionDef),
        "longest_classes": longest(ast.ClassDef),
        "crossed": step_of_tnt(),
    }
    for name, value in record.items():
        if name != "provenance":
            typer.echo(f"{name}: {value}")
    write_json(out, record)


if __name__ == "__main__":
    typer.run(main)
