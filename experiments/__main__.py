"""The experiments as commands: `python -m experiments` lists them.

Every module of this folder with a function `main` is a command, and its `QUICK` lists scaled-down
runs of it: a new experiment is a new file.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

import experiments
from experiments import options
from experiments.options import DATA_MISSING, Quick, chosen

MINUTES = 40.0
_GRACE = 5.0  # seconds between asking a process to end and killing it

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The paper, repeated. results/README.md has the recorded runs.",
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


def stages(modules: dict[str, ModuleType]) -> list[tuple[str, Quick]]:
    """The command and the arguments of every quick run; those that read data come last."""
    found = [(name, q) for name, module in modules.items() for q in getattr(module, "QUICK", [])]
    return sorted(found, key=lambda stage: stage[1].needs_data)


def run_quick(
    todo: Iterable[tuple[str, Quick]], folder: Path, data: Path | None, minutes: float
) -> bool:
    """Run each stage in its own process and within its time; returns whether none failed.

    A stage without its data is left out, and no failure. A stage that is started again continues
    its record.
    """
    todo, began, good = list(todo), time.monotonic(), True
    folder.mkdir(parents=True, exist_ok=True)
    for place, (command, stage) in enumerate(todo):
        left = 60 * minutes - (time.monotonic() - began)
        # No stage uses the time that the later ones are expected to need.
        later = sum(60 * quick.minutes for _, quick in todo[place + 1 :])
        limit = min(60 * max(2 * stage.minutes, 5.0), left, max(left - later, 60 * stage.minutes))
        print(f"[{place + 1}/{len(todo)}] {command} {stage.arguments}", flush=True)
        arguments = [command, *stage.arguments.split(), "--out", str(folder / f"{stage.name}.json")]
        if data is not None and stage.needs_data:
            arguments += ["--data", str(data)]
        started = time.monotonic()
        code = run_in_time(arguments, folder / f"{stage.name}.log", limit)
        outcome = {0: "passed", DATA_MISSING: "not run", None: "out of time"}.get(code, "failed")
        good = good and code in (0, DATA_MISSING)
        last = "" if code == 0 else f": {_last_line(folder / f'{stage.name}.log')}"
        print(f"{stage.name:18} {outcome:11} {time.monotonic() - started:6.1f} s{last}", flush=True)
    print(f"records, pictures and logs: {folder}")
    return good


def run_in_time(arguments: list[str], log: Path, seconds: float) -> int | None:
    """The exit status of a command; None if it and its children were ended at the limit."""
    if seconds < 1:
        log.write_text("no time was left for it\n", encoding="utf-8")
        return None
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # to end all its children, too
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=patience)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    return next(
        (line.strip(" │") for line in reversed(text.splitlines()) if line.strip(" │╰─╯")), ""
    )


def run_everything(
    data: options.Data = None,
    quick: options.QuickRun = False,
    only: Annotated[str, typer.Option("--only", metavar="STAGE,…")] = "all",
    minutes: Annotated[float, typer.Option("--minutes", min=0.1)] = MINUTES,
    out: Annotated[Path, typer.Option("--out", help="A folder.")] = Path("results/quick"),
) -> None:
    """Run every experiment scaled down, in 40 minutes on two cores; needs --quick.

    A stage that still runs at the end of its time is ended. Without --quick the experiments take
    days: results/README.md has a command for each.
    """
    if not quick:
        raise typer.BadParameter("give --quick; results/README.md has the full commands")
    # If this process is ended, it ends its stage.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    known = stages(commands())
    names = chosen(only, [stage.name for _, stage in known])
    todo = [(command, stage) for command, stage in known if stage.name in names]
    if not run_quick(todo, out.resolve(), data, minutes):
        raise typer.Exit(1)


for _name, _module in commands().items():
    app.command(_name)(_module.main)
app.command("all")(run_everything)

if __name__ == "__main__":
    app()
