"""The one training loop of the experiments: same start, same batches, whatever the optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.clock import now
from experiments.problems.problem import Problem, seeded_model
from experiments.runs.checkpoint import Checkpoint
from experiments.runs.methods import LABELS, METHODS, build_optimizer
from experiments.runs.settings import Settings, lr_multiplier
from tnt_optim import PreconditionerError


class ParametersStill(RuntimeError):
    """A parameter did not move in the first epoch: its time and loss would mean nothing."""


@dataclass(frozen=True)
class Epoch:
    """One epoch: its smoothed loss at the end, its seconds, and the seconds since the start.

    `elapsed_seconds` counts the warm start and all epochs so far, so the list of epochs is also
    the record of time against loss. `metrics` are measured at the epoch's end, outside its time.
    """

    number: int
    smoothed_loss: float
    seconds: float
    elapsed_seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """What a training run did. Losses are the minibatch losses before each update."""

    problem: str
    settings: Settings
    optimizer_defaults: dict[str, Any]
    steps_per_epoch: int
    loss_floor: float | None
    warm_start_seconds: float | None = None
    step_losses: list[float] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    diverged_at_step: int | None = None
    # After which epochs another process went on.
    resumed_after: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The optimizer's name as the paper writes it."""
        return LABELS[self.settings.optimizer]

    @property
    def final_loss(self) -> float:
        """The smoothed loss at the last epoch's end; infinite for a run that diverged."""
        return math.inf if self.diverged_at_step is not None else self.epochs[-1].smoothed_loss

    @property
    def seconds_per_epoch(self) -> float:
        """Median over the epochs; the warm start is not in it."""
        return statistics.median(epoch.seconds for epoch in self.epochs)

    def seconds_to(self, loss: float) -> float | None:
        """Seconds, warm start included, until the smoothed loss was at most `loss`; None if never.

        Within an epoch all steps count as equally long.
        """
        for step, value in enumerate(smoothed(self.step_losses)):
            if value <= loss:
                epoch = self.epochs[step // self.steps_per_epoch]
                # this loss was computed before the step's update, so the step is not counted
                left = self.steps_per_epoch - step % self.steps_per_epoch
                return epoch.elapsed_seconds - epoch.seconds * left / self.steps_per_epoch
        return None

    def record(self) -> dict[str, Any]:
        """The run as a JSON-ready dictionary; `write_json` turns non-finite losses into null."""
        return {
            "problem": self.problem,
            "settings": asdict(self.settings),
            "optimizer_defaults": self.optimizer_defaults,
            "steps_per_epoch": self.steps_per_epoch,
            "loss_floor": self.loss_floor,
            "initial_loss": self.step_losses[0],
            "final_smoothed_loss": self.final_loss,
            "diverged_at_step": self.diverged_at_step,
            "warm_start_seconds": self.warm_start_seconds,
            "seconds_per_epoch": self.seconds_per_epoch,
            "resumed_after": self.resumed_after,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            # a float32 has no more than 9 significant digits
            "step_losses": [float(f"{loss:.9g}") for loss in self.step_losses],
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Run:
        """The run that `record` is of, with null losses as NaN."""
        return cls(
            problem=record["problem"],
            settings=Settings(**record["settings"]),
            optimizer_defaults=record["optimizer_defaults"],
            steps_per_epoch=record["steps_per_epoch"],
            loss_floor=record["loss_floor"],
            warm_start_seconds=record["warm_start_seconds"],
            step_losses=[math.nan if loss is None else loss for loss in record["step_losses"]],
            epochs=[
                Epoch(
                    **epoch
                    | {
                        "smoothed_loss": _number(epoch["smoothed_loss"]),
                        "metrics": {k: _number(v) for k, v in epoch["metrics"].items()},
                    }
                )
                for epoch in record["epochs"]
            ],
            diverged_at_step=record["diverged_at_step"],
            resumed_after=record.get("resumed_after", []),
        )


def smoothed(losses: list[float], previous: float | None = None) -> list[float]:
    """The paper's plotted loss: s <- 0.9 s + 0.1 loss, starting at the first loss.

    Args:
        losses: minibatch losses in their order.
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

    The start, the batches and their augmentation depend on the seed alone, so runs of several
    optimizers compare. The data are on the device as a whole. A loss that is not finite ends the
    run, which is then marked as diverged, and so do statistics or inverses that fail.

    Args:
        problem: the data, the model and the loss.
        settings: the optimizer and everything else there is to choose.
        device: where to train.
        report_every: print a line each so many epochs and show a progress bar on a terminal; 0
            for silence.
        checkpoint: a file to go on from, and to leave behind every minute or so, at an epoch's
            end; gone when the run is done. It is not written while the clock runs.
        check_moved: whether a parameter that the first epoch leaves where it was is an error; a
            search over learning rates may well try one that rounds to nothing.

    Raises:
        ValueError: the batch size is larger than the data.
        CheckpointError: the checkpoint is of other settings, or none.
        ParametersStill: a parameter did not move in the first epoch.
    """
    device = torch.device(device)
    steps = problem.steps_per_epoch(settings.batch_size)
    problem = problem.to(device)
    model = seeded_model(problem, settings.seed).to(device)
    optimizer = build_optimizer(model, settings, problem.likelihood)
    run = Run(
        problem=problem.name,
        settings=settings,
        optimizer_defaults=_plain(optimizer.defaults),
        steps_per_epoch=steps,
        loss_floor=problem.loss_floor,
    )
    shuffle = torch.Generator().manual_seed(settings.seed)
    augment = torch.Generator(device).manual_seed(settings.seed)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    saved = Checkpoint(
        checkpoint, problem.description(), run, model, optimizer, [shuffle, augment], device
    )
    resumed = saved.load()
    _wake(problem, settings, device)
    if not resumed and settings.warm_start:
        began = now(device)
        try:
            _warm_start(optimizer, model, problem, settings, device, report_every > 0)
        except PreconditionerError:  # divergence, as in a step
            _add_epoch(run, 1, [math.nan], now(device) - began, problem.evaluate(model))
            return run
        run.warm_start_seconds = now(device) - began
        if report_every:
            tqdm.write(f"{run.label:6} warm start: {run.warm_start_seconds:.2f} s")
    with tqdm(
        total=settings.epochs * steps,
        initial=len(run.step_losses),
        desc=run.label,
        unit="step",
        leave=False,
        disable=None if report_every else True,
    ) as bar:
        loop = _Loop(optimizer, model, problem, settings, augment, bar)
        for number in range(len(run.epochs) + 1, settings.epochs + 1):
            order = problem.order(settings.batch_size, shuffle).to(device)
            began = now(device)
            losses = loop.epoch(number, order)
            seconds = now(device) - began
            _add_epoch(run, number, losses, seconds, problem.evaluate(model))
            if check_moved and number == 1 and run.diverged_at_step is None:
                _check_moved(model, start)
            last = run.diverged_at_step is not None or number == settings.epochs
            if report_every and (last or number % report_every == 0):
                tqdm.write(_epoch_line(run))
            if run.diverged_at_step is not None:
                break
            if not last:
                saved.save()
    saved.remove()
    return run


def _add_epoch(
    run: Run, number: int, losses: list[float], seconds: float, metrics: dict[str, float]
) -> None:
    before = run.epochs[-1] if run.epochs else None
    elapsed = before.elapsed_seconds if before else run.warm_start_seconds or 0.0
    final = smoothed(losses, before.smoothed_loss if before else None)[-1]
    run.step_losses += losses
    run.epochs.append(Epoch(number, final, seconds, elapsed + seconds, metrics))
    bad = [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    if bad:
        run.diverged_at_step = (number - 1) * run.steps_per_epoch + bad[0]


def _wake(problem: Problem, settings: Settings, device: torch.device) -> None:
    """Take a throwaway step: a process's first one loads libraries, which is nobody's training."""
    model = seeded_model(problem, seed=0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    indices = problem.warm_start_order(settings.batch_size)[0].to(device)
    inputs, targets = problem.batch(indices, torch.Generator(device).manual_seed(0))
    problem.loss(model(inputs), targets).backward()
    optimizer.step()


@dataclass
class _Loop:
    """What every step needs."""

    optimizer: torch.optim.Optimizer
    model: nn.Module
    problem: Problem
    settings: Settings
    augment: torch.Generator
    bar: Any

    def epoch(self, number: int, order: Tensor) -> list[float]:
        """One pass over the batches of `order`; the losses are fetched once, at the end."""
        losses: list[Tensor] = []
        self.model.train()
        try:
            for index, batch in enumerate(order.unbind()):
                self._set_rate((number - 1) * len(order) + index, len(order))
                losses.append(self._step(batch))
                self.bar.update()
        except PreconditionerError:
            # The optimizer stops where its statistics or inverses fail again and again:
            # divergence, like a NaN.
            losses.append(torch.full((), math.nan, device=order.device))
        fetched: list[float] = torch.stack(losses).tolist()
        return fetched

    def _step(self, batch: Tensor) -> Tensor:
        inputs, targets = self.problem.batch(batch, self.augment)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.problem.loss(outputs, targets)
        if METHODS[self.settings.optimizer].statistics == "sampled":
            self.optimizer.observe(outputs)  # type: ignore[attr-defined]
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _set_rate(self, step: int, steps_per_epoch: int) -> None:
        if self.settings.schedule == "constant":
            return
        steps = self.settings.epochs * steps_per_epoch
        factor = lr_multiplier(self.settings.schedule, step, steps_per_epoch, steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * factor


def _warm_start(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    problem: Problem,
    settings: Settings,
    device: torch.device,
    show: bool,
) -> None:
    """Average the statistics over the data set's batches."""
    # In the data's order, with an augmentation of its own: the generators of the training must not
    # notice whether this ran.
    batches = problem.warm_start_order(settings.batch_size).to(device)
    augment = torch.Generator(device).manual_seed(settings.seed)
    empirical = METHODS[settings.optimizer].statistics == "empirical"

    def outputs_or_losses() -> Iterator[Tensor]:
        shown = tqdm(
            batches, "warm start", unit="batch", leave=False, disable=None if show else True
        )
        for indices in shown:
            inputs, targets = problem.batch(indices, augment)
            outputs = model(inputs)
            yield problem.loss(outputs, targets) if empirical else outputs

    model.train()
    optimizer.warm_start(outputs_or_losses(), model=model)  # type: ignore[attr-defined]


def _check_moved(model: nn.Module, start: list[Tensor]) -> None:
    still = [
        name
        for (name, parameter), before in zip(model.named_parameters(), start, strict=True)
        if torch.equal(parameter.detach(), before)
    ]
    if still:
        raise ParametersStill(
            f"the first epoch left parameters where they were, so its time and loss mean nothing: "
            f"{', '.join(still)}"
        )


def _epoch_line(run: Run) -> str:
    epoch = run.epochs[-1]
    line = (
        f"{run.label:6} epoch {epoch.number:3}/{run.settings.epochs}  "
        f"smoothed loss {epoch.smoothed_loss:8.3f}  {epoch.seconds:6.2f} s"
    )
    line += "".join(f"  {name} {value:.4g}" for name, value in epoch.metrics.items())
    if run.diverged_at_step is not None:
        line += f"  diverged: the loss of step {run.diverged_at_step} is not finite"
    return line


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plain(defaults: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's own view of its settings, as far as JSON can hold it."""
    return {
        name: value if isinstance(value, bool | int | float | str | tuple | None) else repr(value)
        for name, value in defaults.items()
    }
