"""Warnings at the user's line of code, and texts that several places use."""

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

import torch

UNOBSERVED = (
    "statistics are due at this step, but observe(output) was not called since the last one: going "
    "on with the old statistics (warned once)"
)

TWICE = (
    "the hook of attach and calls of observe both gave outputs at this step: if they are of one "
    "batch, it counts twice; leave one of the two out (warned once)"
)
UNFINISHED = (
    "the last step stopped in the middle of its update: call step() again before you save, or go "
    "back to an earlier checkpoint"
)
IN_EVAL = (
    "; the attached model was called in eval mode, in which attach observes nothing: call "
    "model.train(), or observe(output) yourself"
)

_INSIDE = tuple(os.path.dirname(str(file)) + os.sep for file in (__file__, torch.__file__))


def observed_by_some(*, here: bool) -> str:
    """What to say if some processes observed an output and others did not."""
    one, other = ("This", "another") if here else ("Another", "this")
    return (
        f"{one} process observed an output, but {other} one did not: call observe(output) in every "
        "process, or attach(model). Otherwise the statistics cover a part of the batch only"
    )


def guide(page: str) -> str:
    """A guide's address, or its name while the addresses of pyproject.toml are placeholders."""
    with suppress(PackageNotFoundError):
        for entry in metadata("tnt_kernels").get_all("Project-URL", ()):
            name, _, address = entry.partition(", ")
            if name == "Documentation" and "/OWNER/" not in address:
                return f"{address}/{page}.md"
    return f'the guide "{page.capitalize()}"'


def names_of(group: Mapping[str, Any]) -> list[Any]:
    """The names of a group's parameters; an index where there is no name."""
    given = group.get("param_names", ())
    return [*given, *range(len(given), len(group["params"]))]


def warn_if_twice(observations: Any) -> None:
    """Warns once if a step has observations of both ``attach`` and the loop."""
    if 0 < observations.attached < observations.count and not observations.warned_twice:
        observations.warned_twice = True
        warn_the_caller(TWICE)


def warn_if_unbounded(group: Mapping[str, Any]) -> None:
    """Warns of settings with which steps have no bound."""
    if group["relative_damping"] and group["graft"] is None:
        warn_the_caller(
            "relative_damping=True with graft=None has directions of the scale of 1 / gradient, "
            "without bound: a parameter whose gradient is zero or only rounding at times (a bias "
            "before batch norm, LoRA's A) grows until training diverges. Set graft='adam'"
        )


def warn_the_caller(message: str) -> None:
    """Warns at the user's line: torch wraps ``step`` in functions of its own."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
