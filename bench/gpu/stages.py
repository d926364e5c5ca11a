"""The job's stages, in their order, and how the time is shared out among them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu.driver import Stage


def _stage(name: str, does: str, seconds: float, module: str, needs_device: bool = True) -> Stage:
    return Stage(name, does, seconds, ("-m", f"bench.gpu.{module}"), needs_device)


STAGES = (
    _stage("build", "builds the extension with CUDA", 110, "extension_build"),
    _stage("tests", "runs the tests that need a GPU", 110, "device_tests"),
    _stage("sanitizer", "looks for stray accesses and races", 45, "sanitizer"),
    _stage("kernels", "times every operator against its baselines", 150, "kernels"),
    _stage("step", "times the optimizer's whole step", 60, "optimizer_steps"),
    _stage("training", "trains the MNIST autoencoder for three epochs", 40, "training"),
    _stage("report", "makes tables and plots of what was measured", 20, "report", False),
)


def chosen(names: str | None) -> list[Stage]:
    """The stages of a comma-separated list, in the job's order; all, where there is none.

    Raises:
        ValueError: a name is no stage's, or there is none.

    >>> [stage.name for stage in chosen("tests,build")]
    ['build', 'tests']
    """
    known = [stage.name for stage in STAGES]
    if names is None:
        return list(STAGES)
    asked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise ValueError(f"must be one or several of {', '.join(known)}, got {names!r}")
    return [stage for stage in STAGES if stage.name in asked]


def shares(stages: Sequence[Stage]) -> float:
    """The seconds that all of them need at most."""
    return sum(stage.seconds for stage in stages)
