"""The one training loop of the experiments: same start, same batches, whatever the optimizer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bench.experiments.models import loss_floor, reconstruction_loss, seeded_autoencoder
from bench.experiments.problems import (
    LABELS,
    Problem,
    Settings,
    steps_per_epoch,
)
from tnt_optim import TNT, PreconditionerError


@dataclass(frozen=True)
class Epoch:
    """One epoch: its smoothed loss at the end, its seconds, and the seconds since the start.

    `elapsed_seconds` counts the warm start and all epochs so far, so the list of epochs is also
    the record of time against loss.
    """

    number: int
    smoothed_loss: float
    seconds: float
    elapsed_seconds: float


@dataclass
class Run:
    """What a training run did. Losses are the minibatch losses before each update."""

    problem: str
    settings: Settings
    optimizer_defaults: dict[str, Any]
    steps_per_epoch: int
    loss_floor: float
    warm_start_seconds: float | None = None
    step_losses: list[float] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    diverged_at_step: int | None = None

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
            "epochs": [asdict(epoch) for epoch in self.epochs],
            # a float32 has no more than 9 significant digits
            "step_losses": [float(f"{loss:.9g}") for loss in self.step_losses],
        }


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


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that `settings` name, over all parameters of `model`."""
    parameters = model.named_parameters()  # with the names, so that TNT's warnings have them
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)
    assert settings.damping is not None, "only SGD-m has no damping"
    if settings.optimizer == "adam":
        return torch.optim.Adam(
            parameters,
            lr=settings.lr,
            betas=(settings.momentum, 0.999),
            eps=settings.damping,
        )
    assert settings.stat_interval is not None and settings.inverse_interval is not None
    return TNT(
        parameters,
        lr=settings.lr,
        damping=settings.damping,
        momentum=settings.momentum,
        likelihood="bernoulli",
        fisher="empirical" if settings.optimizer == "tnt-ef" else "sampled",
        stat_interval=settings.stat_interval,
        inverse_interval=settings.inverse_interval,
        seed=settings.seed,
    )


def train(
    problem: Problem,
    settings: Settings,
    device: torch.device | str = "cpu",
    report_every: int = 1,
) -> Run:
    """Train the problem's autoencoder from the start and on the batches that the seed gives.

    The start and the batches depend on the seed alone, so runs of several optimizers compare. The
    data are on the device as a whole. A loss that is not finite ends the run, which is then
    marked as diverged.

    Args:
        problem: the images and the model's widths.
        settings: the optimizer and everything else there is to choose.
        device: where to train.
        report_every: print a line each so many epochs and show a progress bar on a terminal; 0
            for silence.

    Raises:
        ValueError: the batch size is larger than the data.
        RuntimeError: a parameter did not move in the first epoch.
    """
    device = torch.device(device)
    images = problem.images.to(device)
    model = seeded_autoencoder(problem.widths, settings.seed).to(device)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model, settings)
    run = Run(
        problem=problem.name,
        settings=settings,
        optimizer_defaults=_plain(optimizer.defaults),
        steps_per_epoch=steps_per_epoch(problem, settings),
        loss_floor=loss_floor(problem.images),
    )
    _wake(problem.widths, images[: settings.batch_size])
    if isinstance(optimizer, TNT) and settings.warm_start:
        run.warm_start_seconds = _warm_start(optimizer, model, images, settings, report_every > 0)
        if report_every:
            tqdm.write(f"{run.label:6} warm start: {run.warm_start_seconds:.2f} s")
    shuffle = torch.Generator().manual_seed(settings.seed)
    elapsed = run.warm_start_seconds or 0.0
    with tqdm(
        total=settings.epochs * run.steps_per_epoch,
        desc=run.label,
        unit="step",
        leave=False,
        disable=None if report_every else True,
    ) as bar:
        for number in range(1, settings.epochs + 1):
            order = torch.randperm(images.shape[0], generator=shuffle)
            began = _now(device)
            losses = _train_epoch(optimizer, model, images, order.to(device), settings, bar)
            seconds = _now(device) - began
            elapsed += seconds
            previous = run.epochs[-1].smoothed_loss if run.epochs else None
            epoch = Epoch(number, smoothed(losses, previous)[-1], seconds, elapsed)
            run.step_losses += losses
            run.epochs.append(epoch)
            bad = [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]
            if bad:
                run.diverged_at_step = (number - 1) * run.steps_per_epoch + bad[0]
            elif number == 1:
                _check_moved(model, start)
            if report_every and (bad or number % report_every == 0 or number == settings.epochs):
                tqdm.write(_epoch_line(run, epoch))
            if bad:
                break
    return run


def _wake(widths: tuple[int, ...], inputs: Tensor) -> None:
    """Take a throwaway step: a process's first one loads libraries, which is nobody's training."""
    model = seeded_autoencoder(widths, seed=0).to(inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reconstruction_loss(model(inputs), inputs).backward()
    optimizer.step()


def _train_epoch(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    images: Tensor,
    order: Tensor,
    settings: Settings,
    bar: Any,
) -> list[float]:
    """One pass over the whole batches of `order`; the losses are fetched once, at the end."""
    losses: list[Tensor] = []
    steps = order.shape[0] // settings.batch_size
    try:
        for batch in order[: steps * settings.batch_size].reshape(steps, -1).unbind():
            inputs = images[batch]
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = reconstruction_loss(outputs, inputs)
            losses.append(loss.detach())
            if isinstance(optimizer, TNT):
                optimizer.observe(outputs)
            loss.backward()
            optimizer.step()
            bar.update()
    except PreconditionerError:
        # TNT stops where its statistics or inverses fail again and again: divergence, like a NaN.
        losses[-1] = torch.full_like(losses[-1], math.nan)
    fetched: list[float] = torch.stack(losses).tolist()
    return fetched


def _warm_start(
    optimizer: TNT,
    model: nn.Module,
    images: Tensor,
    settings: Settings,
    show: bool,
) -> float:
    """Average the statistics over the data set's batches; returns the seconds it took."""
    steps = images.shape[0] // settings.batch_size
    # In the data's order: the generator of the shuffles must not notice whether this ran.
    whole = images[: steps * settings.batch_size]
    batches = whole.reshape(steps, settings.batch_size, -1).unbind()

    def outputs_or_losses() -> Iterator[Tensor]:
        shown = tqdm(
            batches, "warm start", unit="batch", leave=False, disable=None if show else True
        )
        for inputs in shown:
            outputs = model(inputs)
            empirical = settings.optimizer == "tnt-ef"
            yield reconstruction_loss(outputs, inputs) if empirical else outputs

    began = _now(images.device)
    optimizer.warm_start(outputs_or_losses(), model=model)
    return _now(images.device) - began


def _now(device: torch.device) -> float:
    """The clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _check_moved(model: nn.Module, start: list[Tensor]) -> None:
    still = [
        name
        for (name, parameter), before in zip(model.named_parameters(), start, strict=True)
        if torch.equal(parameter.detach(), before)
    ]
    if still:
        raise RuntimeError(
            f"the first epoch left parameters where they were, so its time and loss mean nothing: "
            f"{', '.join(still)}"
        )


def _epoch_line(run: Run, epoch: Epoch) -> str:
    line = (
        f"{run.label:6} epoch {epoch.number:3}/{run.settings.epochs}  "
        f"smoothed loss {epoch.smoothed_loss:8.3f}  {epoch.seconds:6.2f} s"
    )
    if run.diverged_at_step is not None:
        line += f"  diverged: the loss of step {run.diverged_at_step} is not finite"
    return line


def _plain(defaults: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's own view of its settings, as far as JSON can hold it."""
    return {
        name: value if isinstance(value, bool | int | float | str | tuple | None) else repr(value)
        for name, value in defaults.items()
    }
