"""Figure 1: cosine similarity of each method's direction to block Fisher's, along its run.

The paper leaves some choices open. Here:

- activations are tanh, as in Martens & Grosse 2015 and in the authors' code, with PyTorch's default
  start;
- block Fisher has the damping and the learning rate, of a small grid, with which it trains best;
- all matrices start with their average over the same few batches, as in the paper's warm start;
- everything is refreshed at every step (T1 = T2 = 1), and every moving average decays by 0.9
  (Adam's second moment by 0.999, as in the paper's appendix);
- every damping of the paper's search is recorded. The first row of the picture has the damping with
  which a method, at its best learning rate, trains itself best; the second row the damping with
  which it is most similar.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from experiments import options
from experiments.block_fisher import (
    FIGURE_WIDTHS,
    BlockFisher,
    classifier,
    layer_vector,
    linear_layers,
)
from experiments.data import data_folder
from experiments.data.mnist import mnist_16x16, mnist_labels
from experiments.methods import METHODS
from experiments.models import seeded
from experiments.options import Quick, numbers, user_errors
from experiments.plots import band, plain_axes, save
from experiments.run_files import RunFile
from experiments.training import smoothed
from tnt_optim import KFAC, TNT, PreconditionerError, Shampoo
from tnt_optim.likelihoods import stream_seed
from tools.measuring.tables import table

QUICK = [Quick("figure1", 3, "--quick --seeds 0,1,2", needs_data=True)]

Batch = tuple[Tensor, Tensor]  # inputs (m, features), float64, and labels (m,), int64


@dataclass(frozen=True)
class Grid:
    """The dampings of a method, as in the paper's search, and its learning rates, in half decades.

    The learning rates, of the method's own training, lie around those that this network needs.
    """

    dampings: tuple[float | None, ...]
    rates: tuple[float, ...]


GRIDS = {
    "tnt": Grid(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    ),
    "kfac": Grid((0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)),
    "shampoo": Grid((1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    "adam": Grid((1e-8, 1e-4, 1e-2), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    "sgd": Grid((None,), (1e-2, 3e-2, 1e-1, 3e-1)),
}
# The seed of the methods' own training, which chooses their dampings.
SEARCH_SEED = 1000


@dataclass(frozen=True)
class Scale:
    """The size of the experiment: steps, their batches, batches of the warm start, block Fisher."""

    iterations: int = 100
    batch_size: int = 500
    warm_batches: int = 10
    rates: tuple[float, ...] = (0.01, 0.03, 0.1)
    dampings: tuple[float, ...] = (0.001, 0.01, 0.1)


FULL = Scale()
SMALL = Scale(40, 200, 5, (0.03,), (0.01,))


def main(
    data: options.Data = None,
    seeds: options.Seeds = "0",
    quick: options.QuickRun = False,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Figure 1: similarity of each method's direction to block Fisher's, on 16x16 MNIST.

    First each method trains itself with every damping and learning rate of its grid.
    """
    options.set_machine(threads)
    scale = SMALL if quick else FULL
    out = out or Path("results/figure1.json")
    with user_errors():
        folder = data_folder("mnist", data)
        inputs, labels = mnist_16x16(folder).double(), mnist_labels(folder)
        file = RunFile(out, "figure 1", _protocol(scale, inputs))
    for key in search_keys():
        if file.find(key) is None:
            loss = file.add(key, own_training(key, inputs, labels, scale))["smoothed_loss"]
            print(
                f"{METHODS[key['method']].label:8} {_name(key['damping'])}, {key['lr']:g}: {loss}"
            )
    damping, lr = _reference_pair(file, inputs, labels, scale)
    for seed in numbers(seeds):
        key = {"part": "similarity", "seed": seed}
        if file.find(key) is None:
            file.add(key, similarities(inputs, labels, scale, seed, damping, lr))
    compared = [run for run in file.runs if run["key"]["part"] == "similarity"]
    choices = {"trains best": best_dampings(file.runs), "most similar": most_similar(compared)}
    plot(compared, choices, out.with_suffix(".png"))
    print(report(compared, choices))
    print(f"wrote {out} and {out.with_suffix('.png')}")


def search_keys() -> list[dict[str, Any]]:
    """The runs that choose a damping: every learning rate with every damping of a method."""
    return [
        {"part": "own training", "method": name, "damping": damping, "lr": lr, "seed": SEARCH_SEED}
        for name, grid in GRIDS.items()
        for damping, lr in itertools.product(grid.dampings, grid.rates)
        if len(grid.dampings) > 1
    ]


def best_dampings(runs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Each method's damping in its best own training, by the lowest smoothed loss.

    Raises:
        ValueError: a method diverges with all its dampings and learning rates.
    """
    best: dict[str, float | None] = {}
    for name, grid in GRIDS.items():
        tried = [run for run in runs if run["key"].get("method") == name]
        finite = [run for run in tried if _is_number(run["smoothed_loss"])]
        if tried and not finite:
            raise ValueError(f"{name} diverges with all its dampings and learning rates")
        found = min(finite, key=lambda run: float(run["smoothed_loss"]), default=None)
        best[name] = found["key"]["damping"] if found else grid.dampings[0]
    return best


def most_similar(compared: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Each method's damping with the largest mean similarity over the layers.

    It flatters all methods, those with more dampings a little more.
    """
    return {
        name: max(
            grid.dampings,
            key=lambda damping: statistics.fmean(layer_means(compared, name, damping)),
        )
        for name, grid in GRIDS.items()
    }


def layer_means(
    compared: Sequence[Mapping[str, Any]], method: str, damping: float | None
) -> list[float]:
    """A method's mean similarity in each layer, over iterations and runs."""
    runs = [run["similarity"][method][_name(damping)] for run in compared]
    return [
        statistics.fmean(value for run in runs for value in run[layer] if _is_number(value))
        for layer in range(len(runs[0]))
    ]


def _reference_pair(
    file: RunFile, inputs: Tensor, labels: Tensor, scale: Scale
) -> tuple[float, float]:
    """The damping and the learning rate with which block Fisher trains itself best."""
    pairs = list(itertools.product(scale.dampings, scale.rates))
    if len(pairs) == 1:
        return pairs[0]
    losses = {}
    for damping, lr in pairs:
        key = {"part": "block Fisher", "damping": damping, "lr": lr, "seed": SEARCH_SEED}
        run = file.find(key) or file.add(
            key, reference_training(inputs, labels, scale, damping, lr)
        )
        if _is_number(run["smoothed_loss"]):
            losses[damping, lr] = float(run["smoothed_loss"])
    if not losses:
        raise ValueError("block Fisher diverges with all its dampings and learning rates")
    return min(losses, key=lambda pair: losses[pair])


def reference_training(
    inputs: Tensor, labels: Tensor, scale: Scale, damping: float, lr: float
) -> dict[str, Any]:
    """Block Fisher's own training, with the start and the batches of the methods' trainings."""
    began = time.perf_counter()
    model = _model(SEARCH_SEED)
    reference = BlockFisher(model, damping=damping, seed=stream_seed(SEARCH_SEED, "block Fisher"))
    batches = _batches(inputs, labels, scale, SEARCH_SEED)
    reference.warm_start([x for x, _ in itertools.islice(batches, scale.warm_batches)])
    losses: list[float] = []
    for x, y in itertools.islice(batches, scale.iterations):
        try:
            losses.append(reference.directions(x, y)[1])
        except ArithmeticError:  # it diverged
            losses.append(math.inf)
            break
        reference.step(lr)
    return {"smoothed_loss": smoothed(losses)[-1], "seconds": _since(began)}


def similarities(
    inputs: Tensor, labels: Tensor, scale: Scale, seed: int, damping: float, lr: float
) -> dict[str, Any]:
    """One block-Fisher run, and the directions of all methods with all their dampings along it.

    Args:
        inputs: all of them, (N, 256), float64.
        labels: (N,), int64.
        scale: the size of the experiment.
        seed: of the start, the batches and the samples.
        damping: block Fisher's.
        lr: block Fisher's.

    Returns:
        ``similarity[method][damping][layer]``, a list over the iterations, for the layers between
        the first and the last; the number of steps that each optimizer refused; and block Fisher's
        losses before each step.
    """
    began = time.perf_counter()
    model = _model(seed)
    reference = BlockFisher(model, damping=damping, seed=stream_seed(seed, "block Fisher"))
    followers = [
        Follower(name, damping, model, seed=stream_seed(seed, name))
        for name, grid in GRIDS.items()
        for damping in grid.dampings
    ]
    batches = _batches(inputs, labels, scale, seed)
    warm = list(itertools.islice(batches, scale.warm_batches))
    reference.warm_start(x for x, _ in warm)
    for follower in followers:
        follower.warm_start(warm)
    middle = range(1, len(linear_layers(model)) - 1)
    losses: list[float] = []
    found: dict[str, dict[str, list[list[float]]]] = {
        name: {_name(damping): [[] for _ in middle] for damping in grid.dampings}
        for name, grid in GRIDS.items()
    }
    for _ in tqdm(range(scale.iterations), f"seed {seed}", leave=False, disable=None):
        x, y = next(batches)
        directions, loss = reference.directions(x, y)
        losses.append(float(f"{loss:.6g}"))
        for follower in followers:
            others = follower.directions(model, x, y)
            series = found[follower.method][_name(follower.damping)]
            for values, layer in zip(series, middle, strict=True):
                values.append(round(similarity(directions[layer], others[layer]), 4))
        reference.step(lr)
    return {
        "similarity": found,
        "block_fisher": {"damping": damping, "lr": lr},
        "refused_steps": {
            f"{follower.method} {_name(follower.damping)}": follower.refusals
            for follower in followers
            if follower.refusals
        },
        "block_fisher_losses": losses,
        "seconds": _since(began),
    }


def similarity(first: Tensor, second: Tensor) -> float:
    """The cosine of the angle between two vectors; NaN if one is zero."""
    if not (first.any() and second.any()):
        return math.nan
    return functional.cosine_similarity(first, second, dim=0, eps=0.0).item()


class Follower:
    """A method that gives its direction at each point of another method's run.

    It has a copy of the model and the optimizer itself; momenta and statistics are of the gradients
    along the run.

    Args:
        method: a key of `GRIDS`.
        damping: of the method.
        model: a `classifier`, which is copied.
        seed: of its sampled labels.
    """

    def __init__(self, method: str, damping: float | None, model: nn.Sequential, seed: int) -> None:
        self.method, self.damping = method, damping
        self.model = copy.deepcopy(model)
        self.optimizer = _optimizer(method, self.model, 1.0, damping, seed)
        self.refusals = 0

    def warm_start(self, batches: Sequence[Batch]) -> None:
        """Start the statistics, if the method has any, at the model's present weights."""
        try:
            warm_start(self.optimizer, self.model, batches)
        except PreconditionerError:
            self.refusals += 1

    def directions(self, model: nn.Sequential, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Each layer's direction at the weights of `model`, as a `layer_vector`.

        It is what the optimizer's own step subtracts from the parameters at a learning rate of 1;
        zero if the optimizer refuses the step because it has no inverses (see `refusals`).
        """
        pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        with torch.no_grad():
            for own, other in pairs:
                own.copy_(other)
        backward(self.optimizer, self.model, inputs, labels)
        with torch.no_grad():
            # Without weight decay a step does not depend on the weights: from zero it leaves its
            # direction in them, exactly.
            for own, _ in pairs:
                own.zero_()
        try:
            self.optimizer.step()
        except PreconditionerError:
            self.refusals += 1
        return [
            -layer_vector(layer.weight.detach(), layer.bias.detach())
            for layer in linear_layers(self.model)
        ]


def backward(
    optimizer: torch.optim.Optimizer, model: nn.Module, inputs: Tensor, labels: Tensor
) -> float:
    """A training step without the optimizer's step; returns the loss."""
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = functional.cross_entropy(outputs, labels)
    if isinstance(optimizer, TNT | KFAC):
        optimizer.observe(outputs)
    loss.backward()
    return loss.item()


def warm_start(
    optimizer: torch.optim.Optimizer, model: nn.Module, batches: Sequence[Batch]
) -> None:
    """Average the optimizer's statistics, if it has any, over the batches."""
    if isinstance(optimizer, TNT | KFAC):
        optimizer.warm_start((model(inputs) for inputs, _ in batches), model=model)
    elif isinstance(optimizer, Shampoo):
        losses = (functional.cross_entropy(model(x), labels) for x, labels in batches)
        optimizer.warm_start(losses, model=model)


def _optimizer(
    method: str, model: nn.Module, lr: float, damping: Any, seed: int
) -> torch.optim.Optimizer:
    """A method with momentum and averages of 0.9, T1 = T2 = 1, and no weight decay."""
    second_order: dict[str, Any] = {
        **{"damping": damping, "momentum": 0.9, "stat_decay": 0.9},
        **{"weight_decay": 0.0, "stat_interval": 1, "inverse_interval": 1},
    }
    if method == "tnt":
        return TNT(model.named_parameters(), lr, seed=seed, **second_order)
    if method == "kfac":
        return KFAC(model, lr, seed=seed, **second_order)
    if method == "shampoo":
        return Shampoo(model.named_parameters(), lr, **second_order)
    if method == "adam":
        return torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.999), eps=damping)
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def own_training(
    key: Mapping[str, Any], inputs: Tensor, labels: Tensor, scale: Scale
) -> dict[str, Any]:
    """A method's own training; the smoothed loss is infinite if it diverges."""
    began = time.perf_counter()
    model, losses = _model(SEARCH_SEED), [math.inf]
    optimizer = _optimizer(key["method"], model, key["lr"], key["damping"], SEARCH_SEED)
    batches = _batches(inputs, labels, scale, SEARCH_SEED)
    try:
        warm_start(optimizer, model, list(itertools.islice(batches, scale.warm_batches)))
        found = []
        for x, y in itertools.islice(batches, scale.iterations):
            found.append(backward(optimizer, model, x, y))
            if not math.isfinite(found[-1]):
                break
            optimizer.step()
        losses = found if math.isfinite(found[-1]) else losses
    except PreconditionerError:
        pass
    return {"smoothed_loss": smoothed(losses)[-1], "seconds": _since(began)}


def _model(seed: int) -> nn.Sequential:
    return seeded(lambda: classifier(FIGURE_WIDTHS), seed)


def _batches(inputs: Tensor, labels: Tensor, scale: Scale, seed: int) -> Iterator[Batch]:
    """Minibatches without end: epochs of whole batches, each with a new shuffle."""
    generator = torch.Generator().manual_seed(seed)
    whole = inputs.shape[0] // scale.batch_size * scale.batch_size
    while True:
        order = torch.randperm(inputs.shape[0], generator=generator)[:whole]
        for batch in order.reshape(-1, scale.batch_size):
            yield inputs[batch], labels[batch]


def _protocol(scale: Scale, inputs: Tensor) -> dict[str, Any]:
    return {
        "widths": FIGURE_WIDTHS,
        "activation": "tanh",
        "loss": "cross entropy, mean over the batch",
        "iterations": scale.iterations,
        "batch_size": scale.batch_size,
        "warm_batches": scale.warm_batches,
        "block_fisher": {"rates": scale.rates, "dampings": scale.dampings},
        "decay": 0.9,
        "intervals": "T1 = T2 = 1",
        "dampings": {name: grid.dampings for name, grid in GRIDS.items()},
        "criterion": "a method's damping, and block Fisher's, is the one with which, at its best "
        "learning rate, it has the lowest smoothed training loss after as many iterations",
        "data": {"examples": len(inputs), "mean": round(inputs.mean().item(), 6)},
    }


def plot(
    compared: Sequence[Mapping[str, Any]],
    choices: Mapping[str, Mapping[str, float | None]],
    path: Path,
) -> None:
    """Draw a row of panels for each choice of dampings, and a panel for each layer."""
    layers = len(compared[0]["similarity"]["sgd"]["none"])
    figure, panels = pyplot.subplots(
        *(len(choices), layers),
        figsize=(3.6 * layers, 3.2 * len(choices) + 0.6),
        sharex=True,
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for row, (choice, dampings) in zip(panels, choices.items(), strict=True):
        for layer, axes in enumerate(row):
            for name, damping in dampings.items():
                runs = [run["similarity"][name][_name(damping)][layer] for run in compared]
                columns = [
                    [math.nan if value is None else value for value in column]
                    for column in zip(*runs, strict=True)
                ]
                method = METHODS[name]
                x = range(1, len(columns) + 1)
                band(axes, x, columns, color=method.colour, label=method.label, linewidth=1.6)
            plain_axes(axes)
        row[0].set_ylabel(f"cosine similarity,\ndamping: {choice}")
    for layer, (top, bottom) in enumerate(zip(panels[0], panels[-1], strict=True)):
        top.set_title(f"layer {layer + 2}", fontsize=10)
        bottom.set_xlabel("iteration")
    panels[0][0].set_ylim(top=1.0)  # last: a limit ends the shared axis' autoscaling
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    save(figure, path, f"Directions along block Fisher's run, {len(compared)} seeds")


def report(
    compared: Sequence[Mapping[str, Any]], choices: Mapping[str, Mapping[str, float | None]]
) -> str:
    """The mean similarities of every layer, and those of every damping."""
    rows = []
    for choice, dampings in choices.items():
        for name, damping in dampings.items():
            means = layer_means(compared, name, damping)
            cells = [f"{value:.3f}" for value in [*means, statistics.fmean(means)]]
            rows.append([f"{METHODS[name].label}, {choice}", _name(damping), *cells])
    layers = [f"layer {layer + 2}" for layer in range(len(rows[0]) - 3)]
    lines = table(["", "damping", *layers, "mean"], rows)
    for name, grid in GRIDS.items():
        each = [
            f"{_name(d)}: {statistics.fmean(layer_means(compared, name, d)):.3f}"
            for d in grid.dampings
        ]
        lines.append(f"{METHODS[name].label:8} mean with every damping: {', '.join(each)}")
    return "\n".join(lines)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


def _is_number(value: float | None) -> bool:
    """Whether the value is finite: a file has None for other values."""
    return value is not None and math.isfinite(value)


def _name(damping: float | None) -> str:
    """A damping as a record's key."""
    return "none" if damping is None else f"{damping:g}"
