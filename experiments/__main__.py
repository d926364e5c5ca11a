"""The experiments as commands: `python -m experiments` lists them.

Every module of this folder with a function `main` is a command, and its `QUICK` lists scaled-down
runs of it: a new experiment is a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated

from tools.measuring.packages import require_bench

require_bench()

import typer

import experiments
from experiments import options
from experiments.options import DATA_MISSING, Quick, chosen

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The paper's experiments, and comparisons beyond it. experiments/results has the records.",
)


def commands() -> dict[str, ModuleType]:
    """The modules with a `main`, by the name of their command."""
    found = {}
    for module in pkgutil.iter_modules(experiments.__path__):
        if not module.ispkg and module.name != "__main__":
            loaded = importlib.import_module(f"experiments.{module.name}")
            if hasattr(loaded, "main"):
                found[module.name.replace("_", "-")] = loaded
    return found


def stages() -> list[tuple[str, Quick]]:
    """The command and the arguments of every quick run; those that read data come last."""
    found = [(name, q) for name, module in commands().items() for q in getattr(module, "QUICK", [])]
    return sorted(found, key=lambda stage: stage[1].needs_data)


def run_stage(command: str, stage: Quick, folder: Path, data: Path | None) -> str:
    """Run a stage in its own process, which continues its record; print and return the outcome."""
    arguments = [command, *stage.arguments.split(), "--out", str(folder / f"{stage.name}.json")]
    if data is not None and stage.needs_data:
        arguments += ["--data", str(data)]
    log = folder / f"{stage.name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(
            [sys.executable, "-m", "experiments", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    seconds = time.monotonic() - started
    outcome = {0: "passed", DATA_MISSING: "not run"}.get(code, "failed")
    last = "" if code == 0 else f": {_last_line(log)}"
    print(f"{stage.name:18} {outcome:8} {seconds:6.1f} s{last}", flush=True)
    return outcome


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    unframed = [line.strip(" │╰─╯") for line in lines]
    return next(filter(None, reversed(unframed)), "")


def run_everything(
    data: options.Data = None,
    quick: options.QuickRun = False,
    only: Annotated[str, typer.Option("--only", metavar="STAGE,…")] = "all",
    out: Annotated[Path, typer.Option("--out", help="A folder.")] = Path("results/quick"),
) -> None:
    """Run every experiment scaled down; needs --quick.

    A stage without its data is not run, and no failure. Without --quick the experiments take days:
    experiments/results/README.md has a command for each.
    """
    if not quick:
        raise typer.BadParameter(
            "give --quick; experiments/results/README.md has the full commands"
        )
    # A stage ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    known = stages()
    names = chosen(only, [stage.name for _, stage in known])
    todo = [(command, stage) for command, stage in known if stage.name in names]
    folder = out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for number, (command, stage) in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {command} {stage.arguments}", flush=True)
        outcomes.append(run_stage(command, stage, folder, data))
    print(f"records, pictures and logs: {folder}")
    if "failed" in outcomes:
        raise typer.Exit(1)


for _name, _module in commands().items():
    app.command(_name)(_module.main)
app.command("all")(run_everything)

if __name__ == "__main__":
    try:
        app()
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:
            print("stopped; the same command goes on from what is saved", file=sys.stderr)
        raise
