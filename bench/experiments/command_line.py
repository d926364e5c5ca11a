"""What the commands' arguments share: checked numbers, the device, the data."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from bench.experiments.problems import Problem, load_problem
from bench.records import check_writable


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
        help="CPU threads (default: PyTorch's own choice; 1 for the digits)",
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


def checked_problem(parser: argparse.ArgumentParser, data: str) -> Problem:
    """The problem that `--data` names; exits with a usage error where it cannot be read."""
    try:
        return load_problem(data)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(f"argument --data: {error}")


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
