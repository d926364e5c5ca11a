"""The options of the commands, one name everywhere, and the scaled-down run of each command."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.data import DataMissingError
from experiments.methods import (
    METHODS,
    Settings,
    default_settings,
    lr_multiplier,
    method_settings,
    takes_graft,
)

# Exit status of a command whose data are missing.
DATA_MISSING = 77

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with the data sets' folders in it. Default: TNT_DATA."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="The record, FILE.json; continued if it exists. Default: results/."),
]
Seeds = Annotated[str, typer.Option("--seeds", metavar="N,N,…", help="One run for each.")]
Optimizers = Annotated[
    str, typer.Option("--optimizer", metavar="NAME,…", help="Several, or all of them.")
]
Epochs = Annotated[int | None, typer.Option("--epochs", min=1)]
Steps = Annotated[int, typer.Option("--steps", min=1)]
Examples = Annotated[int | None, typer.Option("--examples", min=1, help="Default: all.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Processes, with one thread each.")]
QuickRun = Annotated[bool, typer.Option("--quick", help="Smaller and shorter.")]


@dataclass(frozen=True)
class Quick:
    """The scaled-down run of a command in `python -m experiments all --quick`.

    Attributes:
        name: of the stage; its record is `NAME.json`.
        arguments: of the command.
        needs_data: whether it reads data, which may be missing; such stages run last.
    """

    name: str
    arguments: str
    needs_data: bool = False


def problem_argument(known: Iterable[str]) -> Any:
    """The argument PROBLEM of a command: one of the known names."""
    names = ", ".join(known)

    def check(value: str) -> str:
        if value not in names.split(", "):
            raise typer.BadParameter(f"must be one of {names}, got {value!r}")
        return value

    return typer.Argument(help=f"One of {names}.", callback=check)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas; each once.

    >>> numbers("0,1,1,5")
    (0, 1, 5)
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"must be numbers separated by commas, got {text!r}") from None


def chosen(text: str, known: Sequence[str]) -> list[str]:
    """Names, separated by commas; "all" for all that are known.

    >>> chosen("b,a", ["a", "b", "c"]), chosen("all", ["a", "b"])
    (['b', 'a'], ['a', 'b'])
    """
    if text == "all":
        return list(known)
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"must be all or some of {', '.join(known)}, got {text!r}")
    return names


def overridden(settings: Settings, overrides: Sequence[str]) -> Settings:
    """The settings with other values, each `SETTING=VALUE`; `default` for the optimizer's own.

    Raises:
        typer.BadParameter: there is no such setting, or this optimizer does not have it, or the
            value does not fit.
    """
    if "default" in overrides and takes_graft(settings.optimizer):
        kept = {name: getattr(settings, name) for name in ("batch_size", "epochs", "schedule")}
        settings = default_settings(settings.optimizer, **kept)
        overrides = [override for override in overrides if override != "default"]
    values: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise typer.BadParameter(f"after a slash must be SETTING=VALUE, got {override!r}")
        values[name] = setting_value(name, text)
        if not has_setting(settings.optimizer, name):
            label = METHODS[settings.optimizer].label
            raise typer.BadParameter(f"{override}: {label} has no such setting")
    return replace(settings, **values)


def setting_value(name: str, text: str) -> Any:
    """The value of a setting from its text, by the type of the field in `Settings`.

    >>> setting_value("lr", "1e-3"), setting_value("warm_start", "false")
    (0.001, False)
    """
    kinds = typing.get_type_hints(Settings)
    for own in ("optimizer", "seed", "epochs"):  # which the commands' own options set
        del kinds[own]
    if name not in kinds:
        raise typer.BadParameter(f"a setting must be one of {', '.join(kinds)}, got {name!r}")
    kind = next(k for k in (typing.get_args(kinds[name]) or (kinds[name],)) if k is not type(None))
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        value = kind(text)
        if name == "schedule":
            lr_multiplier(value, 0, 1, 1)
        elif kind is not str and not 0 <= value < float("inf"):
            raise ValueError(value)
    except (KeyError, ValueError):
        raise typer.BadParameter(f"{name}: no such value: {text!r}") from None
    return value


def has_setting(optimizer: str, name: str) -> bool:
    """Whether an optimizer has a setting; its value is otherwise None."""
    full = method_settings(optimizer, 1.0, 1.0, graft="adam", batch_size=1, epochs=1)
    return getattr(full, name) is not None


def set_machine(threads: int | None, device: str = "cpu") -> torch.device:
    """Set the number of threads; return the device.

    Raises:
        typer.BadParameter: there is no such device.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"--device: PyTorch has no {device!r} here")
    return torch.device(device)


@contextmanager
def user_errors(kinds: tuple[type[Exception], ...] = (OSError, ValueError)) -> Iterator[None]:
    """Report errors of the user's files and settings as a line, not as a traceback.

    Args:
        kinds: of the errors.
    """
    try:
        yield
    except DataMissingError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(DATA_MISSING) from error
    except kinds as error:
        raise typer.BadParameter(str(error)) from error
