"""The one training loop of the experiments: same start, same batches, for every optimizer."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.methods import METHODS, Settings, build_optimizer, lr_multiplier, observes
from experiments.models import seeded
from experiments.problems.problem import Problem
from tnt_kernels.benchmark.clock import now
from tnt_kernels.benchmark.provenance import flushes_subnormals
from tnt_optim import PreconditionerError

# Between two checkpoints, at the ends of epochs: writing one takes about as long as a step.
SECONDS_BETWEEN = 60.0


class StationaryParametersError(RuntimeError):
    """The first epoch did not change a parameter, so its time and loss mean nothing."""


class CheckpointError(ValueError):
    """The checkpoint of an unfinished run does not fit; it is not changed."""


@dataclass
class Epoch:
    """One epoch.

    Attributes:
        number: from 1.
        smoothed_loss: at its end.
        seconds: of the epoch.
        elapsed_seconds: since the start of the run, with the warm start.
        metrics: measured at its end, outside its time.
    """

    number: int
    smoothed_loss: float
    seconds: float
    elapsed_seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """The record of one training run. Losses are the minibatch losses before each update."""

    problem: str
    settings: Settings
    steps_per_epoch: int
    loss_floor: float | None
    warm_start_seconds: float | None = None
    step_losses: list[float] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    diverged_at_step: int | None = None
    # The epochs after which another process continued the run.
    resumed_after: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The optimizer's name as the paper writes it."""
        return METHODS[self.settings.optimizer].label

    @property
    def final_loss(self) -> float:
        """The smoothed loss at the end of the last epoch; infinite if the run diverged."""
        return math.inf if self.diverged_at_step is not None else self.epochs[-1].smoothed_loss

    @property
    def seconds_per_epoch(self) -> float:
        """Median over the epochs, without the warm start."""
        return statistics.median(epoch.seconds for epoch in self.epochs)

    def seconds_to(self, loss: float) -> float | None:
        """Seconds, with the warm start, until the smoothed loss is at most `loss`; None if never.

        All steps of an epoch count as equally long.
        """
        for step, value in enumerate(smoothed(self.step_losses)):
            if value <= loss:
                epoch = self.epochs[step // self.steps_per_epoch]
                # The loss was computed before the step's update, so the step does not count.
                left = self.steps_per_epoch - step % self.steps_per_epoch
                return epoch.elapsed_seconds - epoch.seconds * left / self.steps_per_epoch
        return None

    def record(self) -> dict[str, Any]:
        """The run as a dictionary for JSON; `write_json` writes non-finite losses as null."""
        return {
            **asdict(self),
            "initial_loss": self.step_losses[0],
            "final_smoothed_loss": self.final_loss,
            "seconds_per_epoch": self.seconds_per_epoch,
            # A float32 has at most 9 significant digits.
            "step_losses": [float(f"{loss:.9g}") for loss in self.step_losses],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Run:
        """The run of a record, with null losses as NaN.

        Raises:
            ValueError: the record is compact.
        """
        if "step_losses" not in record:
            raise ValueError("a compact record, without losses of steps, cannot go on")
        own = {one.name: record[one.name] for one in fields(cls)}
        own["settings"] = Settings(**record["settings"])
        own["step_losses"] = [_number(loss) for loss in record["step_losses"]]
        own["epochs"] = [Epoch(**epoch) for epoch in record["epochs"]]
        for epoch in own["epochs"]:
            epoch.smoothed_loss = _number(epoch.smoothed_loss)
            epoch.metrics = {name: _number(value) for name, value in epoch.metrics.items()}
        return cls(**own)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def smoothed(losses: Sequence[float], previous: float | None = None) -> list[float]:
    """The paper's plotted loss: s <- 0.9 s + 0.1 loss, starting at the first loss.

    Args:
        losses: minibatch losses in order.
        previous: the smoothed loss before the first of them, if there is one.
    """
    values = []
    for loss in losses:
        previous = loss if previous is None else 0.9 * previous + 0.1 * loss
        values.append(previous)
    return values


def train(
    problem: Problem,
    settings: Settings,
    device: torch.device | str = "cpu",
    report_every: int = 1,
    checkpoint: Path | None = None,
    check_moved: bool = True,
) -> Run:
    """Train the problem's model from the start and on the batches that the seed gives.

    As `train_in_turn` with one run.
    """
    checkpoints = None if checkpoint is None else [checkpoint]
    (run,) = train_in_turn(problem, [settings], device, report_every, checkpoints, check_moved)
    return run


def train_in_turn(
    problem: Problem,
    wanted: Sequence[Settings],
    device: torch.device | str = "cpu",
    report_every: int = 1,
    checkpoints: Sequence[Path] | None = None,
    check_moved: bool = True,
) -> Iterator[Run]:
    """Train with each of the settings, an epoch of each in turn, so that their seconds compare.

    Start, batches and augmentation depend on the seed only, so runs of several optimizers compare.
    All data are on the device. A loss that is not finite ends a run, which then counts as diverged;
    so do failing statistics or inverses.

    Args:
        problem: data, model and loss.
        wanted: of each run, the optimizer and all other choices.
        device: where to train.
        report_every: epochs between two printed lines of a run; 0 for no output.
        checkpoints: each run continues from its file if it exists, writes it at the end of an epoch
            if the last time is a minute ago, and deletes it at its end. Writing is outside the
            measured time.
        check_moved: raise an error if the first epoch does not change some parameter. A search
            over learning rates may try a rate so small that it rounds to nothing.

    Yields:
        Each run at its end.

    Raises:
        ValueError: the batch size is larger than the data.
        CheckpointError: a checkpoint has other settings, or is no checkpoint.
        StationaryParametersError: the first epoch did not change a parameter.
    """
    device = torch.device(device)
    problem = problem.to(device)
    files: Sequence[Path | None] = checkpoints or [None] * len(wanted)
    trainings = [
        _Training(problem, settings, device, file, report_every, check_moved)
        for settings, file in zip(wanted, files, strict=True)
    ]
    with tqdm(
        total=sum(one.settings.epochs * one.run.steps_per_epoch for one in trainings),
        initial=sum(len(one.run.step_losses) for one in trainings),
        unit="step",
        leave=False,
        disable=None if report_every else True,
    ) as bar:
        _load_libraries(problem, wanted[0], device)
        while trainings:
            for one in list(trainings):
                bar.set_description(one.run.label, refresh=False)
                one.epoch(bar)
                if one.ended:
                    trainings.remove(one)
                    yield one.run


class _Training:
    """One of the runs of `train_in_turn`; the arguments are its.

    Another process continues it bit for bit from its file, on the same device with as many threads.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        device: torch.device,
        checkpoint: Path | None,
        report_every: int,
        check_moved: bool,
    ) -> None:
        steps = problem.steps_per_epoch(settings.batch_size)
        self.problem, self.settings, self.device = problem, settings, device
        self.report_every, self.check_moved = report_every, check_moved
        self.model = seeded(problem.build, settings.seed).to(device)
        self.optimizer = build_optimizer(self.model, settings, problem.likelihood)
        self.run = run = Run(problem.name, settings, steps, problem.loss_floor)
        self.shuffle = torch.Generator().manual_seed(settings.seed)
        self.augment = torch.Generator(device).manual_seed(settings.seed)
        self.path, self.written = checkpoint, time.monotonic()
        self.begun = self._load()
        if self.begun and report_every:
            tqdm.write(f"{run.label:6} continues after epoch {len(run.epochs)} of {checkpoint}")

    @property
    def ended(self) -> bool:
        run = self.run
        return run.diverged_at_step is not None or len(run.epochs) == self.settings.epochs

    def epoch(self, bar: Any) -> None:
        """Train for an epoch, the first with the warm start."""
        if not self.begun:
            self.begun = True
            if self.settings.warm_start and not self._warm_start():
                return
        number = len(self.run.epochs) + 1
        start = [p.detach().clone() for p in self.model.parameters()] if number == 1 else None
        order = self.problem.order(self.settings.batch_size, self.shuffle)
        began = now(self.device)
        losses = self._pass(order.to(self.device), bar)
        self._add_epoch(losses, now(self.device) - began)
        if self.check_moved and start is not None and self.run.diverged_at_step is None:
            _check_moved(self.model, start)
        if self.report_every and (self.ended or number % self.report_every == 0):
            tqdm.write(_epoch_line(self.run))
        if self.path is not None:
            if self.ended:
                self.path.unlink(missing_ok=True)
            elif time.monotonic() - self.written >= SECONDS_BETWEEN:
                self._save(self.path)

    def _warm_start(self) -> bool:
        """Average the statistics over the data set's batches; False if they fail."""
        # In the data's order, with its own augmentation: the generators of the training must be the
        # same with and without a warm start.
        batches = self.problem.warm_start_order(self.settings.batch_size).to(self.device)
        augment = torch.Generator(self.device).manual_seed(self.settings.seed)
        empirical = METHODS[self.settings.optimizer].statistics == "empirical"

        def outputs_or_losses() -> Iterator[Tensor]:
            for indices in batches:
                inputs, targets = self.problem.batch(indices, augment)
                outputs = self.problem.outputs(self.model, inputs)
                yield self.problem.loss(outputs, targets) if empirical else outputs

        began = now(self.device)
        self.model.train()
        try:
            self.optimizer.warm_start(outputs_or_losses(), model=self.model)  # type: ignore[attr-defined]
        except PreconditionerError:  # divergence, as in a step
            self._add_epoch([math.nan], now(self.device) - began)
            return False
        self.run.warm_start_seconds = now(self.device) - began
        if self.report_every:
            tqdm.write(f"{self.run.label:6} warm start: {self.run.warm_start_seconds:.2f} s")
        return True

    def _pass(self, order: Tensor, bar: Any) -> list[float]:
        """One pass over the batches of `order`.

        The losses are fetched once, at the end; on a CPU the progress bar shows each.
        """
        losses: list[Tensor] = []
        first = len(self.run.step_losses)
        self.model.train()
        try:
            for index, batch in enumerate(order.unbind()):
                self._set_rate(first + index)
                losses.append(self._step(batch))
                if not bar.disable and order.device.type == "cpu":
                    bar.set_postfix_str(f"loss {losses[-1]:.4g}", refresh=False)
                bar.update()
        except PreconditionerError:
            # The optimizer raises it if statistics or inverses fail repeatedly: divergence.
            losses.append(torch.full((), math.nan, device=order.device))
        fetched: list[float] = torch.stack(losses).tolist()
        return fetched

    def _step(self, batch: Tensor) -> Tensor:
        inputs, targets = self.problem.batch(batch, self.augment)
        self.optimizer.zero_grad()
        outputs = self.problem.outputs(self.model, inputs)
        loss = self.problem.loss(outputs, targets)
        if observes(self.settings):
            self.optimizer.observe(outputs)  # type: ignore[attr-defined]
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _set_rate(self, step: int) -> None:
        if self.settings.schedule == "constant":
            return
        steps = self.run.steps_per_epoch
        factor = lr_multiplier(self.settings.schedule, step, steps, self.settings.epochs * steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * factor

    def _add_epoch(self, losses: list[float], seconds: float) -> None:
        run = self.run
        before = run.epochs[-1] if run.epochs else None
        elapsed = before.elapsed_seconds if before else run.warm_start_seconds or 0.0
        final = smoothed(losses, before.smoothed_loss if before else None)[-1]
        metrics = self.problem.evaluate(self.model)
        run.step_losses += losses
        run.epochs.append(Epoch(len(run.epochs) + 1, final, seconds, elapsed + seconds, metrics))
        bad = [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]
        if bad:
            run.diverged_at_step = len(run.step_losses) - len(losses) + bad[0]

    def _described(self) -> dict[str, Any]:
        return {
            **self.problem.description(),
            **asdict(self.settings),
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "flush_subnormals": flushes_subnormals(),
        }

    def _load(self) -> bool:
        """Restore the state in the file; False if there is no file.

        Raises:
            CheckpointError: the file is no checkpoint, or has other settings.
        """
        if self.path is None or not self.path.exists():
            return False
        try:
            saved: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
            settings, record = dict(saved["settings"]), saved["run"]
            if saved.get("part"):  # as Ctrl-C wrote it once
                raise ValueError("it is of the middle of an epoch")
        except Exception as error:
            raise CheckpointError(
                f"{self.path} is no checkpoint of this experiment ({error}): delete it"
            ) from error
        own = self._described()
        differing = sorted(n for n in {*settings, *own} if settings.get(n) != own.get(n))
        if differing:
            raise CheckpointError(
                f"{self.path} is of a run with other settings ({', '.join(differing)}): delete it "
                "to start again, or give another file"
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for generator, state in zip((self.shuffle, self.augment), saved["generators"], strict=True):
            generator.set_state(state)
        done = Run.from_record(record)
        self.run.step_losses, self.run.epochs = done.step_losses, done.epochs
        self.run.warm_start_seconds = done.warm_start_seconds
        self.run.resumed_after = [*done.resumed_after, len(done.epochs)]
        return True

    def _save(self, path: Path) -> None:
        partial = path.with_name(path.name + ".part")
        torch.save(
            {
                "settings": self._described(),
                "run": asdict(self.run),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "generators": [self.shuffle.get_state(), self.augment.get_state()],
            },
            partial,
        )
        os.replace(partial, path)
        self.written = time.monotonic()


def _load_libraries(problem: Problem, settings: Settings, device: torch.device) -> None:
    """Take a throwaway step: the first one of a process loads libraries, which takes time."""
    model = seeded(problem.build, 0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    indices = problem.warm_start_order(settings.batch_size)[0].to(device)
    inputs, targets = problem.batch(indices, torch.Generator(device).manual_seed(0))
    problem.loss(model(inputs), targets).backward()
    optimizer.step()


def _check_moved(model: nn.Module, start: list[Tensor]) -> None:
    parameters = zip(model.named_parameters(), start, strict=True)
    same = [name for (name, last), before in parameters if torch.equal(last.detach(), before)]
    if same:
        raise StationaryParametersError(
            f"the first epoch did not change parameters, so its time and loss mean nothing: "
            f"{', '.join(same)}"
        )


def _epoch_line(run: Run) -> str:
    epoch = run.epochs[-1]
    line = (
        f"{run.label:6} epoch {epoch.number:3}/{run.settings.epochs}  "
        f"smoothed loss {epoch.smoothed_loss:8.3f}  {epoch.seconds:6.2f} s/epoch"
    )
    line += "".join(f"  {name} {value:.4g}" for name, value in epoch.metrics.items())
    if run.diverged_at_step is not None:
        line += f"  diverged: the loss of step {run.diverged_at_step} is not finite"
    return line
