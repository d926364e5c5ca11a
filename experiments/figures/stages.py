"""The stages: each one experiment's command, with arguments that two cores can pay for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.stage_runs import CHECKOUT


@dataclass(frozen=True)
class Need:
    """Data that a stage may need.

    Attributes:
        what: in words.
        default: where it is looked for, relative to the checkout.
        is_file: a file, and no folder.
    """

    what: str
    default: str
    is_file: bool = False


DATA = {
    "mnist": Need("folder with MNIST's IDX files", "data/mnist"),
    "faces": Need(
        "folder with FACES (newfaces_rot_single.mat) or the Olivetti faces (olivettifaces.mat)",
        "data/faces",
    ),
    "cifar10": Need("folder with the Python version of CIFAR-10", "data/cifar10"),
    "text": Need("a text in UTF-8, such as tiny Shakespeare", "data/text/input.txt", is_file=True),
}


@dataclass(frozen=True)
class Stage:
    """One part of the job.

    Attributes:
        name: as on the command line; its record is `NAME.json`.
        does: what it does, in a few words.
        minutes: what it takes on two cores that nothing else uses.
        command: Python's arguments; "{data}" is where its data are, "{out}" its record.
        needs: a key of `DATA`, or None.
        limit: after so many minutes it is ended; None for twice its own, and five at least.
    """

    name: str
    does: str
    minutes: float
    command: tuple[str, ...]
    needs: str | None = None
    limit: float | None = None

    @property
    def file(self) -> str:
        """Its record."""
        return f"{self.name}.json"

    @property
    def limit_minutes(self) -> float:
        """After so many minutes it is ended."""
        return max(2 * self.minutes, 5.0) if self.limit is None else self.limit

    def lacks(self, data: Mapping[str, Path | None]) -> str | None:
        """What it needs and there is not, in words; None where it can run."""
        if self.needs is None or data[self.needs] is not None:
            return None
        need = DATA[self.needs]
        return f"{need.what}: give {self.needs.upper()}=, or put it at {need.default}"

    def arguments(self, folder: Path, data: Mapping[str, Path | None]) -> list[str]:
        """Its command's arguments for Python."""
        where = "" if self.needs is None else str(data[self.needs])
        places = {"{data}": where, "{out}": str(folder / self.file)}
        return [places.get(argument, argument) for argument in self.command]

    def shown(self) -> str:
        """Its command, as one would type it."""
        places = {"{data}": (self.needs or "").upper(), "{out}": self.file}
        return " ".join(["python", *(places.get(a, a) for a in self.command)])


def _stage(
    name: str, does: str, minutes: float, module: str, arguments: str, needs: str | None = None
) -> Stage:
    data = ("--data", "{data}") if needs else ()
    command = ("-m", f"experiments.{module}", *data, *arguments.split(), "--out", "{out}")
    return Stage(name, does, minutes, command, needs)


# What needs no data first. Minutes are estimates for two idle cores; they leave some of the 40
# unspent. Shampoo is left out of MNIST and FACES, whose matrices have up to 1000 and 2000 rows:
# the 20 refreshes of its roots in a run's first 20 steps would take more than all else together.
# The digits' settings were chosen by a search from seeds 1 to 5: they are judged on others.
STAGES = (
    _stage(
        *("idealized", "Algorithm 1 beside Theorem 1's bound", 0.5, "idealized"),
        "--iterations 1000 --seeds 0 1 2",
    ),
    _stage(
        *("digits", "autoencoder on digits, all methods", 1.5, "autoencoder"),
        "--data digits --optimizer all --seeds 6 7 8 9 10 --epochs 60",
    ),
    _stage(
        *("search", "searches the digits' learning rates and dampings", 2.5, "search"),
        "autoencoder --data digits --optimizer tnt adam sgd --lr 0.0001 0.001 0.01 0.03 0.1 "
        "--damping 1e-08 0.0001 0.03 0.1 --seeds 1 2 3 4 5 6 --epochs 20 --jobs 2",
    ),
    _stage(
        *("curves", "autoencoder on generated curves", 2, "autoencoder"),
        "--data curves --examples 10000 --optimizer all --seeds 0 1 2 --epochs 6",
    ),
    _stage(
        *("step-times", "seconds of a training step", 1.5, "step_times"),
        "--quick --longest-refresh 5",
    ),
    _stage(
        *("sensitivity", "one learning rate at several settings", 2, "sensitivity"),
        "--quick --seeds 0 1 --forms tnt tnt-grafted --jobs 2",
    ),
    _stage(*("complexity", "memory and time orders of Table 2", 2, "complexity"), "--quick"),
    _stage(
        *("cosine", "directions beside block Fisher's", 3, "cosine"),
        "--iterations 40 --batch-size 200 --warm-batches 5 --seeds 0 1 2 --lr 0.03 --damping 0.01",
        needs="mnist",
    ),
    _stage(
        *("mnist", "autoencoder on MNIST, Tables 3 and 6", 5, "autoencoder"),
        "--optimizer tnt tnt-ef kfac adam sgd --seeds 0 1 --epochs 2",
        needs="mnist",
    ),
    _stage(
        *("mnist-tuned", "autoencoder on MNIST, Table 5", 3.5, "autoencoder"),
        "--table 5 --optimizer tnt adam sgd --seeds 0 1 --epochs 3",
        needs="mnist",
    ),
    _stage(
        *("faces", "autoencoder on face patches", 5, "autoencoder"),
        "--examples 10000 --optimizer tnt kfac adam sgd --seeds 0 1 --epochs 4",
        needs="faces",
    ),
    _stage(
        *("resnet32", "ResNet-32 on some of CIFAR-10", 3, "cnn"),
        "--model resnet32 --subset 768 --optimizer all --epochs 2",
        needs="cifar10",
    ),
    _stage(
        *("language", "character transformer, all forms", 5, "language_table"),
        "--scale small --lengths 200 --seeds 0 1 2 --timing-threads 1",
        needs="text",
    ),
)


def chosen(names: Sequence[str] | None) -> list[Stage]:
    """The stages with these names, in the job's order; all, where none are given.

    Raises:
        ValueError: a name is no stage's; the message lists those there are.

    >>> [stage.name for stage in chosen(["mnist", "digits"])]
    ['digits', 'mnist']
    """
    known = [stage.name for stage in STAGES]
    if names is None:
        return list(STAGES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"must be one or several of {', '.join(known)}, got {', '.join(unknown)}")
    return [stage for stage in STAGES if stage.name in names]


def checked_data(name: str, given: Path | None) -> Path | None:
    """Where one of `DATA` is; None where it was not given and its default place is empty.

    Raises:
        ValueError: what was given is not there.
    """
    need = DATA[name]
    path = (given or CHECKOUT / need.default).expanduser()
    if path.is_file() if need.is_file else path.is_dir():
        return path.resolve()
    if given is None:
        return None
    raise ValueError(f"must be a {'file' if need.is_file else 'folder'}, got {given}")
