"""Figure 1: cosine similarity of each method's direction to block Fisher's, along its run.

The paper leaves some choices open. Here:

- activations are tanh, as in Martens & Grosse 2015 and in the authors' code, or ReLU; the start is
  PyTorch's default;
- block Fisher has the damping and the learning rate of a small grid with which it trains best;
- all matrices start with their average over the same few batches, as in the paper's warm start;
- every step refreshes everything (T1 = T2 = 1), and every moving average decays by 0.9 (Adam's
  second moment by 0.999, as in the paper's appendix);
- every damping of the paper's search is recorded. In the picture's first row each method has the
  damping with which it trains best, at its best learning rate; in the second row, the damping with
  which it is most similar; in the third row, the damping of the paper's Table 3 for MNIST.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from experiments import options
from experiments.block_fisher import (
    ACTIVATIONS,
    FIGURE_WIDTHS,
    BlockFisher,
    classifier,
    layer_vector,
    linear_layers,
)
from experiments.data import data_folder
from experiments.data.mnist import mnist_16x16, mnist_labels
from experiments.methods import METHODS, build_optimizer, method_settings
from experiments.models import seeded
from experiments.options import Quick, numbers, user_errors
from experiments.plots import band, plain_axes, save
from experiments.run_files import RunFile
from experiments.tasks import TABLE_3
from experiments.training import smoothed
from tnt_kernels.benchmark.tables import table
from tnt_optim import KFAC, TNT, PreconditionerError, Shampoo
from tnt_optim.likelihoods import stream_seed

QUICK = [Quick("figure1", "--quick --seeds 0,1,2", needs_data=True)]

Batch = tuple[Tensor, Tensor]  # inputs (m, features), float64, and labels (m,), int64
Optimizer = torch.optim.Optimizer | BlockFisher
BLOCK_FISHER = "block Fisher"


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
    """The experiment: steps, their batches, batches of the warm start, block Fisher, activation."""

    iterations: int = 100
    batch_size: int = 500
    warm_batches: int = 10
    block_fisher: Grid = Grid((0.001, 0.01, 0.1), (0.01, 0.03, 0.1))
    activation: str = "tanh"


FULL = Scale()
SMALL = Scale(40, 200, 5, Grid((0.01,), (0.03,)))


def main(
    data: options.Data = None,
    seeds: options.Seeds = "0",
    activation: Annotated[str, options.problem_argument(ACTIVATIONS)] = "tanh",
    quick: options.QuickRun = False,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Figure 1: similarity of each method's direction to block Fisher's, on 16x16 MNIST.

    First each method trains itself with every damping and learning rate of its grid.
    """
    options.set_machine(threads)
    scale = replace(SMALL if quick else FULL, activation=activation)
    out = out or Path(f"results/figure1_{activation}.json")
    with user_errors():
        folder = data_folder("mnist", data)
        inputs, labels = mnist_16x16(folder).double(), mnist_labels(folder)
        mean = round(inputs.mean().item(), 6)
        images = {"examples": len(inputs), "mean": mean}
        grids = {name: grid.dampings for name, grid in GRIDS.items()}
        file = RunFile(out, "figure 1", {**asdict(scale), **images, "dampings": grids})
    for key in search_keys(scale):
        if file.find(key) is None:
            loss = file.add(key, own_training(key, inputs, labels, scale))["smoothed_loss"]
            print(f"{key['method']:12} {_name(key['damping'])}, {key['lr']:g}: {loss}")
    damping, lr = best_pair(file.runs, BLOCK_FISHER, scale.block_fisher)
    for seed in numbers(seeds):
        key = {"part": "similarity", "seed": seed}
        if file.find(key) is None:
            file.add(key, similarities(inputs, labels, scale, seed, damping, lr))
    compared = [run for run in file.runs if run["key"]["part"] == "similarity"]
    choices = {
        "trains best": {name: best_pair(file.runs, name, grid)[0] for name, grid in GRIDS.items()},
        "most similar": most_similar(compared),
        "the paper's": {name: TABLE_3["mnist"][name][1] for name in GRIDS},
    }
    plot(compared, choices["most similar"], out.with_suffix(".png"))
    print(report(compared, choices))
    print(f"wrote {out} and {out.with_suffix('.png')}")


def search_keys(scale: Scale) -> list[dict[str, Any]]:
    """The runs that choose a damping: every learning rate with every damping of a method."""
    return [
        {"part": "own training", "method": name, "damping": damping, "lr": lr, "seed": SEARCH_SEED}
        for name, grid in (GRIDS | {BLOCK_FISHER: scale.block_fisher}).items()
        for damping, lr in itertools.product(grid.dampings, grid.rates)
        if len(grid.dampings) > 1
    ]


def best_pair(runs: Sequence[Mapping[str, Any]], method: str, grid: Grid) -> tuple[Any, float]:
    """The damping and learning rate of a method's own training with the lowest smoothed loss.

    The first ones of the grid if it has only one damping, for which there is no search.

    Raises:
        ValueError: the method diverges with all its dampings and learning rates.
    """
    tried = [run for run in runs if run["key"].get("method") == method]
    finite = [run for run in tried if _is_number(run["smoothed_loss"])]
    if tried and not finite:
        raise ValueError(f"{method} diverges with all its dampings and learning rates")
    if not finite:
        return grid.dampings[0], grid.rates[0]
    key = min(finite, key=lambda run: float(run["smoothed_loss"]))["key"]
    return key["damping"], key["lr"]


def most_similar(compared: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Each method's damping with the largest mean similarity over the layers.

    This choice flatters all methods, and methods with more dampings slightly more.
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


def similarities(
    inputs: Tensor, labels: Tensor, scale: Scale, seed: int, damping: float, lr: float
) -> dict[str, Any]:
    """One block-Fisher run, and the directions of all methods with all their dampings along it.

    Args:
        inputs: all of them, (N, 256), float64.
        labels: (N,), int64.
        scale: the size of the experiment.
        seed: of the start, the batches and the sampled labels.
        damping: block Fisher's, as `lr`.
        lr: block Fisher's.

    Returns:
        ``similarity[method][damping][layer]``, a list over the iterations, for the layers between
        the first and the last; and the number of steps that each optimizer refused.
    """
    model = _model(seed, scale)
    reference = BlockFisher(model, lr, damping, stream_seed(seed, BLOCK_FISHER))
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
    found: dict[str, dict[str, list[list[float]]]] = {
        name: {_name(damping): [[] for _ in middle] for damping in grid.dampings}
        for name, grid in GRIDS.items()
    }
    for _ in tqdm(range(scale.iterations), f"seed {seed}", leave=False, disable=None):
        x, y = next(batches)
        directions, _ = reference.directions(x, y)
        for follower in followers:
            others = follower.directions(model, x, y)
            series = found[follower.method][_name(follower.damping)]
            for values, layer in zip(series, middle, strict=True):
                values.append(round(similarity(directions[layer], others[layer]), 4))
        reference.step()
    return {
        "similarity": found,
        "block_fisher": {"damping": damping, "lr": lr},
        "refused_steps": {
            f"{follower.method} {_name(follower.damping)}": follower.refusals
            for follower in followers
            if follower.refusals
        },
    }


def similarity(first: Tensor, second: Tensor) -> float:
    """The cosine of the angle between two vectors; NaN if one is zero."""
    if not (first.any() and second.any()):
        return math.nan
    return functional.cosine_similarity(first, second, dim=0, eps=0.0).item()


class Follower:
    """A method that gives its direction at each point of another method's run.

    It has a copy of the model. Its momenta and statistics come from the gradients along the run.
    `seed` is of its sampled labels.
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


def backward(optimizer: Optimizer, model: nn.Sequential, inputs: Tensor, labels: Tensor) -> float:
    """A training step without the optimizer's step; returns the loss.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    if isinstance(optimizer, BlockFisher):
        return optimizer.directions(inputs, labels)[1]
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = functional.cross_entropy(outputs, labels)
    if not loss.isfinite():
        raise ArithmeticError(f"the loss is {loss.item()}: is the learning rate too large?")
    if isinstance(optimizer, TNT | KFAC):
        optimizer.observe(outputs)
    loss.backward()
    return loss.item()


def warm_start(optimizer: Optimizer, model: nn.Sequential, batches: Sequence[Batch]) -> None:
    """Average the optimizer's statistics, if it has any, over the batches."""
    if isinstance(optimizer, BlockFisher):
        optimizer.warm_start(inputs for inputs, _ in batches)
    elif isinstance(optimizer, TNT | KFAC):
        optimizer.warm_start((model(inputs) for inputs, _ in batches), model=model)
    elif isinstance(optimizer, Shampoo):
        losses = (functional.cross_entropy(model(x), labels) for x, labels in batches)
        optimizer.warm_start(losses, model=model)


def _optimizer(method: str, model: nn.Sequential, lr: float, damping: Any, seed: int) -> Optimizer:
    """A method with momentum and averages of 0.9, T1 = T2 = 1, and no weight decay."""
    if method == BLOCK_FISHER:
        return BlockFisher(model, lr, damping, stream_seed(seed, method))
    if method == "adam":  # the other experiments' fused AdamW rounds differently
        return torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.999), eps=damping)
    settings = method_settings(
        *(method, lr, damping), intervals=(1, 1), batch_size=0, epochs=0, seed=seed
    )
    return build_optimizer(model, settings, "categorical")


def own_training(
    key: Mapping[str, Any], inputs: Tensor, labels: Tensor, scale: Scale
) -> dict[str, Any]:
    """A method's or block Fisher's own training; the smoothed loss is infinite if it diverges."""
    model, batches = _model(SEARCH_SEED, scale), _batches(inputs, labels, scale, SEARCH_SEED)
    optimizer = _optimizer(key["method"], model, key["lr"], key["damping"], SEARCH_SEED)
    losses: list[float] = []
    try:
        warm_start(optimizer, model, list(itertools.islice(batches, scale.warm_batches)))
        for x, y in itertools.islice(batches, scale.iterations):
            losses.append(backward(optimizer, model, x, y))
            optimizer.step()
    except (ArithmeticError, PreconditionerError):
        losses = [math.inf]
    return {"smoothed_loss": smoothed(losses)[-1]}


def _model(seed: int, scale: Scale) -> nn.Sequential:
    return seeded(lambda: classifier(FIGURE_WIDTHS, scale.activation), seed)


def _batches(inputs: Tensor, labels: Tensor, scale: Scale, seed: int) -> Iterator[Batch]:
    """Minibatches without end: epochs of whole batches, each with a new shuffle."""
    generator = torch.Generator().manual_seed(seed)
    whole = inputs.shape[0] // scale.batch_size * scale.batch_size
    while True:
        order = torch.randperm(inputs.shape[0], generator=generator)[:whole]
        for batch in order.reshape(-1, scale.batch_size):
            yield inputs[batch], labels[batch]


def plot(
    compared: Sequence[Mapping[str, Any]], dampings: Mapping[str, float | None], path: Path
) -> None:
    """Draw a panel for each layer, for one choice of dampings."""
    layers = len(compared[0]["similarity"]["sgd"]["none"])
    figure, panels = pyplot.subplots(
        1, layers, figsize=(3.0 * layers, 3.8), sharey=True, layout="constrained", squeeze=False
    )
    for layer, axes in enumerate(panels[0]):
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
        axes.set_title(f"layer {layer + 2}", fontsize=10)
        axes.set_xlabel("iteration")
    panels[0][0].set_ylabel("cosine similarity")
    panels[0][0].set_ylim(top=1.0)  # last: a limit ends the shared axis' autoscaling
    lines, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, frameon=False)
    title = "Similarity to block Fisher's direction along its run, at the most similar dampings"
    save(figure, path, f"{title}, {len(compared)} seeds")


def report(
    compared: Sequence[Mapping[str, Any]], choices: Mapping[str, Mapping[str, float | None]]
) -> str:
    """The mean similarities of every layer."""
    rows = []
    for choice, dampings in choices.items():
        for name, damping in dampings.items():
            means = layer_means(compared, name, damping)
            cells = [f"{value:.3f}" for value in [*means, statistics.fmean(means)]]
            rows.append([f"{METHODS[name].label}, {choice}", _name(damping), *cells])
    layers = [f"layer {layer + 2}" for layer in range(len(rows[0]) - 3)]
    return "\n".join(table(["", "damping", *layers, "mean"], rows))


def _is_number(value: float | None) -> bool:
    """Whether the value is finite: a file has None for other values."""
    return value is not None and math.isfinite(value)


def _name(damping: float | None) -> str:
    """A damping as a record's key."""
    return "none" if damping is None else f"{damping:g}"
