"""What the commands' arguments share: checked numbers, the device, a run's settings."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from experiments.problems import Problem
from experiments.runs.methods import LABELS, METHODS, has_statistics, takes_graft
from experiments.runs.settings import Settings, lr_multiplier
from tools.measuring.records import check_writable

# Settings that not every optimizer has, by the option that sets them.
_SECOND_ORDER = ("stat_interval", "inverse_interval", "warm_start")
_GRAFTED = ("graft", "relative_damping")


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def nonnegative_float(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {text}")
    return value


def fraction(text: str) -> float:
    """An argparse type: a number of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def seed_int(text: str) -> int:
    """An argparse type: a whole number that torch's generators take as their seed."""
    value = _whole(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2**63, got {text}")
    return value


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--threads`, `--device` and `--flush-subnormals`, which `set_machine` acts on."""
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="CPU threads (default: PyTorch's own choice; 1 for the digits, and in searches)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes a GPU where there is one (default: auto)",
    )
    parser.add_argument(
        "--flush-subnormals",
        action="store_true",
        help="torch.set_flush_denormal(True): on a CPU, numbers below 1.2e-38 are slow",
    )


def set_machine(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, data: str
) -> torch.device:
    """Set the threads and return the device; exits with a usage error where there is no GPU."""
    # Two threads do not speed up matrices of 128 rows, and with other work on the cores they wait
    # for each other.
    threads = 1 if arguments.threads is None and data == "digits" else arguments.threads
    if threads is not None:
        torch.set_num_threads(threads)
    if arguments.flush_subnormals:
        # Before the first parallel operation: the threads take the setting from this one.
        torch.set_flush_denormal(True)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda was asked for, but PyTorch sees no GPU")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if arguments.device == "auto" else arguments.device)


def schedule(text: str) -> str:
    """An argparse type: the name of a learning rate's course."""
    try:
        lr_multiplier(text, 0, 1, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_run_arguments(parser: argparse.ArgumentParser, optimizers: Sequence[str]) -> None:
    """Add everything that `run_settings` reads, `--reach` and `--out`."""
    parser.add_argument(
        "--optimizer",
        required=True,
        nargs="+",
        choices=(*optimizers, "all"),
        help="one or several, or all of them",
    )
    parser.add_argument(
        "--seeds",
        "--seed",
        type=seed_int,
        nargs="+",
        default=[0],
        metavar="N",
        help="one run from each: of the start, the batches and the samples (default: 0)",
    )
    parser.add_argument("--epochs", type=positive_int, metavar="N")
    parser.add_argument("--batch-size", type=positive_int, metavar="M")
    parser.add_argument("--lr", type=positive_float)
    parser.add_argument(
        "--damping", type=nonnegative_float, help="of second-order methods; Adam's epsilon"
    )
    parser.add_argument("--momentum", type=fraction, help="Adam's beta_1")
    parser.add_argument(
        "--stat-decay", type=fraction, help="of the statistics' average; Adam's beta_2"
    )
    parser.add_argument("--weight-decay", type=nonnegative_float, help="decoupled")
    parser.add_argument(
        "--stat-interval", type=positive_int, metavar="T1", help="steps between statistics"
    )
    parser.add_argument(
        "--inverse-interval", type=positive_int, metavar="T2", help="steps between inverses"
    )
    parser.add_argument(
        "--warm-start",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="begin with the data set's statistics, or with the first batch's",
    )
    parser.add_argument(
        "--graft", choices=("adam", "sgd"), help="TNT and Shampoo: steps of that method's length"
    )
    parser.add_argument(
        "--relative-damping",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="TNT and Shampoo: damping relative to the average eigenvalue",
    )
    parser.add_argument(
        "--schedule", type=schedule, help="constant, step:N (epochs) or warmup-cosine"
    )
    parser.add_argument(
        "--reach",
        type=positive_float,
        nargs="+",
        default=[],
        metavar="LOSS",
        help="show the seconds until the smoothed loss is so low",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="the record; the plot is written beside it as .png "
        "(default: results/EXPERIMENT/PROBLEM-OPTIMIZER.json)",
    )


def run_settings(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    problem: Problem,
    optimizers: Sequence[str],
    defaults: Callable[[str], Settings],
) -> list[Settings]:
    """The settings of every run that the command line asks for; exits where they do not fit.

    Args:
        parser: whose usage an error shows.
        arguments: of a parser with `add_run_arguments`.
        problem: the problem, whose size bounds the batch.
        optimizers: what "all" stands for.
        defaults: an optimizer's settings, where the command line says nothing.
    """
    chosen = list(dict.fromkeys(arguments.optimizer))
    if "all" in chosen:
        chosen = list(optimizers)
    names = ["epochs", "batch_size", "lr", "damping", "momentum", "stat_decay", "weight_decay"]
    names += [*_SECOND_ORDER, *_GRAFTED, "schedule"]
    given = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    of_each = []
    for optimizer in chosen:
        for name in given:
            if name in _foreign(optimizer):
                option = name.replace("_", "-")
                if given[name] is False:
                    option = f"no-{option}"
                parser.error(f"argument --{option}: {LABELS[optimizer]} has no such setting")
        try:
            settings = replace(defaults(optimizer), **given)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        of_each.append(settings)
    # Methods in turn: a machine that others slow down for a while slows down all of them.
    seeds = dict.fromkeys(arguments.seeds)
    runs = [replace(settings, seed=seed) for seed in seeds for settings in of_each]
    try:
        problem.steps_per_epoch(runs[0].batch_size)
    except ValueError as error:
        parser.error(f"argument --batch-size: {error}")
    return runs


def _foreign(optimizer: str) -> set[str]:
    """The settings that an optimizer does not have."""
    method = METHODS[optimizer]
    foreign = set() if has_statistics(optimizer) else set(_SECOND_ORDER)
    if not takes_graft(optimizer):
        foreign |= set(_GRAFTED)
    if not method.damped:
        foreign.add("damping")
    if method.stat_decay is None:
        foreign.add("stat_decay")
    return foreign


def checked_output(parser: argparse.ArgumentParser, option: str, path: Path) -> Path:
    """`path`, once it is sure that JSON can be written there; else exits with a usage error."""
    try:
        return check_writable(path)
    except (OSError, ValueError) as error:
        parser.error(f"argument {option}: cannot write there: {error}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
