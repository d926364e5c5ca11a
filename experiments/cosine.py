"""Figure 1, cosine similarity to block Fisher: `python -m experiments.cosine --help`.

What the paper leaves open, and how it is here:

- activations: tanh, as in Martens & Grosse 2015 and in the authors' code; PyTorch's default start;
- block Fisher's damping and learning rate: those, of a small grid, with which it trains best;
- start: all matrices are first averaged over the same few batches, as the paper's warm start does
  over the data set;
- refreshes: at every step (T1 = T2 = 1), with every moving average's decay 0.9 (Adam's second
  moment: 0.999, as in the paper's appendix);
- the methods' dampings: similarities are recorded for every damping of the paper's search; the
  first row of the picture has the one with which the method, at its best learning rate, trains
  itself best, the second the one with which it is most similar.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from experiments.data import mnist_16x16, mnist_labels
from experiments.directions.block_fisher import (
    FIGURE_WIDTHS,
    BlockFisher,
    linear_layers,
    seeded_classifier,
)
from experiments.directions.followers import (
    COMPARED,
    Batch,
    Follower,
    own_training_loss,
    shuffled_batches,
)
from experiments.directions.plot import plot_similarities
from experiments.directions.report import damping_name, is_number, most_similar, report
from experiments.runs.command_line import (
    checked_output,
    positive_float,
    positive_int,
    seed_int,
)
from experiments.runs.run_file import RunFile
from experiments.runs.training import smoothed
from tnt_optim.likelihoods import stream_seed

# Of the methods' own training, which chooses their dampings: no seed of a compared run by default.
SEARCH_SEED = 1000
_QUICK = {"iterations": 5, "batch_size": 100, "warm_batches": 2, "seeds": [0]}
_QUICK |= {"lr": [0.03], "damping": [0.01]}
_FULL = {"iterations": 100, "batch_size": 500, "warm_batches": 10, "seeds": [0]}
_FULL |= {"lr": [0.01, 0.03, 0.1], "damping": [0.001, 0.01, 0.1]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    for name, value in (_QUICK if arguments.quick else _FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if SEARCH_SEED in arguments.seeds:
        parser.error(f"argument --seeds: {SEARCH_SEED} is the search's")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    out = checked_output(parser, "--out", arguments.out)
    try:
        images, labels = mnist_16x16(arguments.data), mnist_labels(arguments.data)
        inputs, labels = checked_examples(images, labels, arguments.batch_size)
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    try:
        runs = RunFile(out, "cosine", _protocol(arguments, inputs))
    except (OSError, ValueError) as error:
        parser.error(f"argument --out: {error}")

    for key in search_keys():
        if runs.find(key) is None:
            began = time.perf_counter()
            loss = _search_run(key, inputs, labels, arguments)
            seconds = round(time.perf_counter() - began, 2)
            runs.add(key, {"smoothed_loss": loss, "seconds": seconds})
            print(f"{COMPARED[key['method']].label:7} {_setting(key)}: smoothed loss {loss:.4f}")
    damping, lr = _reference_pair(runs, inputs, labels, arguments)
    for seed in dict.fromkeys(arguments.seeds):
        key = {"part": "similarity", "seed": seed}
        if runs.find(key) is None:
            runs.add(key, similarities(inputs, labels, arguments, seed, damping, lr))

    compared = [run for run in runs.runs if run["key"]["part"] == "similarity"]
    best = best_settings(runs.runs)
    picture = out.with_suffix(".png")
    choices = {
        "dampings that train best": {name: found["damping"] for name, found in best.items()},
        "dampings that are most similar": most_similar(compared),
    }
    plot_similarities(
        {
            choice: {
                method: [run["similarity"][method][damping_name(damping)] for run in compared]
                for method, damping in dampings.items()
            }
            for choice, dampings in choices.items()
        },
        picture,
    )
    print(report(compared, best))
    print(f"wrote {out} and {picture}")
    return 0


def checked_examples(images: Tensor, labels: Tensor, batch_size: int) -> Batch:
    """The inputs in float64 and the labels, once they fit the network and each other.

    images: (N, 256) or (N, 16, 16); labels: (N,).

    Raises:
        ValueError: they do not fit, or there is not one whole batch of them.
    """
    inputs = images.reshape(images.shape[0], -1).double()
    if inputs.shape[1] != FIGURE_WIDTHS[0]:
        raise ValueError(f"images must have {FIGURE_WIDTHS[0]} pixels, got {inputs.shape[1]}")
    if labels.shape != inputs.shape[:1]:
        raise ValueError(f"there are {len(inputs)} images, but labels {tuple(labels.shape)}")
    if batch_size > len(inputs):
        raise ValueError(f"a batch of {batch_size} needs as many images, got {len(inputs)}")
    return inputs, labels.long()


def search_keys() -> list[dict[str, Any]]:
    """The runs that choose a damping: every learning rate with every damping of a method."""
    return [
        {"part": "own training", "method": name, "damping": damping, "lr": lr, "seed": SEARCH_SEED}
        for name, method in COMPARED.items()
        for damping, lr in itertools.product(method.dampings, method.rates)
        if len(method.dampings) > 1
    ]


def best_settings(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each method the settings of its best own training; it trains best where loss is lowest.

    A method without a damping has nothing to choose, and its similarity no learning rate.
    """
    best: dict[str, dict[str, Any]] = {}
    for name, method in COMPARED.items():
        tried = [run for run in runs if run["key"].get("method") == name]
        finite = [run for run in tried if is_number(run["smoothed_loss"])]
        if not tried:
            best[name] = {"damping": method.dampings[0], "lr": None, "smoothed_loss": None}
            continue
        if not finite:
            raise ValueError(f"{method.label} diverges with all its dampings and learning rates")
        found = min(finite, key=lambda run: float(run["smoothed_loss"]))
        best[name] = {
            "damping": found["key"]["damping"],
            "lr": found["key"]["lr"],
            "smoothed_loss": found["smoothed_loss"],
        }
    return best


def _reference_pair(
    runs: RunFile, inputs: Tensor, labels: Tensor, arguments: argparse.Namespace
) -> tuple[float, float]:
    """The damping and the learning rate with which block Fisher trains itself best."""
    pairs = list(itertools.product(arguments.damping, arguments.lr))
    if len(pairs) == 1:
        return pairs[0]
    losses = {}
    for damping, lr in pairs:
        key = {"part": "block Fisher", "damping": damping, "lr": lr, "seed": SEARCH_SEED}
        run = runs.find(key)
        if run is None:
            run = runs.add(key, _reference_run(inputs, labels, arguments, damping, lr))
            print(f"block Fisher damping {damping:g}, lr {lr:g}: {run['smoothed_loss']:.4f}")
        if is_number(run["smoothed_loss"]):
            losses[damping, lr] = float(run["smoothed_loss"])
    if not losses:
        raise ValueError("block Fisher diverges with all its dampings and learning rates")
    return min(losses, key=lambda pair: losses[pair])


def _reference_run(
    inputs: Tensor, labels: Tensor, arguments: argparse.Namespace, damping: float, lr: float
) -> dict[str, Any]:
    """Block Fisher's own training, from the start and on the batches that the methods have."""
    model = seeded_classifier(FIGURE_WIDTHS, SEARCH_SEED)
    reference = BlockFisher(model, damping=damping, seed=stream_seed(SEARCH_SEED, "block Fisher"))
    generator = torch.Generator().manual_seed(SEARCH_SEED)
    batches = shuffled_batches(inputs, labels, arguments.batch_size, generator)
    began = time.perf_counter()
    reference.warm_start([x for x, _ in itertools.islice(batches, arguments.warm_batches)])
    losses: list[float] = []
    steps = range(arguments.iterations)
    for _ in tqdm(steps, f"block Fisher {damping:g}, {lr:g}", leave=False, disable=None):
        x, y = next(batches)
        try:
            losses.append(reference.directions(x, y)[1])
        except ArithmeticError:  # it diverged
            losses.append(math.inf)
            break
        reference.step(lr)
    seconds = round(time.perf_counter() - began, 2)
    return {"smoothed_loss": smoothed(losses)[-1], "seconds": seconds}


def similarities(
    inputs: Tensor,
    labels: Tensor,
    arguments: argparse.Namespace,
    seed: int,
    damping: float,
    lr: float,
) -> dict[str, Any]:
    """One block-Fisher run, and what all methods with all their dampings say along it.

    Args:
        inputs: all of them.
        labels: likewise.
        arguments: the command's.
        seed: of the start, the batches and the samples.
        damping: block Fisher's.
        lr: block Fisher's.

    Returns:
        ``similarity[method][damping][layer]``, a list over the iterations, for the layers between
        the first and the last; the steps that an optimizer refused, where it did; and block
        Fisher's minibatch losses before each of its steps.
    """
    model = seeded_classifier(FIGURE_WIDTHS, seed)
    reference = BlockFisher(model, damping=damping, seed=stream_seed(seed, "block Fisher"))
    followers = [
        Follower(name, damping, model, seed=stream_seed(seed, name))
        for name, method in COMPARED.items()
        for damping in method.dampings
    ]
    generator = torch.Generator().manual_seed(seed)
    batches = shuffled_batches(inputs, labels, arguments.batch_size, generator)
    warm = list(itertools.islice(batches, arguments.warm_batches))
    began = time.perf_counter()
    reference.warm_start(x for x, _ in warm)
    for follower in followers:
        follower.warm_start(warm)
    middle = range(1, len(linear_layers(model)) - 1)
    losses: list[float] = []
    found: dict[str, dict[str, list[list[float]]]] = {
        name: {damping_name(damping): [[] for _ in middle] for damping in method.dampings}
        for name, method in COMPARED.items()
    }
    for _ in tqdm(range(arguments.iterations), f"seed {seed}", leave=False, disable=None):
        x, y = next(batches)
        directions, loss = reference.directions(x, y)
        losses.append(float(f"{loss:.6g}"))
        for follower in followers:
            others = follower.directions(model, x, y)
            series = found[follower.method][damping_name(follower.damping)]
            for values, layer in zip(series, middle, strict=True):
                values.append(round(similarity(directions[layer], others[layer]), 4))
        reference.step(lr)
    return {
        "similarity": found,
        "block_fisher": {"damping": damping, "lr": lr},
        "refused_steps": {
            f"{follower.method} {damping_name(follower.damping)}": follower.refusals
            for follower in followers
            if follower.refusals
        },
        "block_fisher_losses": losses,
        "seconds": round(time.perf_counter() - began, 2),
    }


def similarity(first: Tensor, second: Tensor) -> float:
    """The cosine of the angle between two vectors; NaN where one is zero."""
    if not (first.any() and second.any()):
        return math.nan
    return functional.cosine_similarity(first, second, dim=0, eps=0.0).item()


def _search_run(
    key: dict[str, Any], inputs: Tensor, labels: Tensor, arguments: argparse.Namespace
) -> float:
    model = seeded_classifier(FIGURE_WIDTHS, key["seed"])
    generator = torch.Generator().manual_seed(key["seed"])
    batches = shuffled_batches(inputs, labels, arguments.batch_size, generator)
    warm = list(itertools.islice(batches, arguments.warm_batches))
    rest = list(itertools.islice(batches, arguments.iterations))
    return own_training_loss(
        key["method"], key["damping"], key["lr"], model, warm, rest, key["seed"]
    )


def _protocol(arguments: argparse.Namespace, inputs: Tensor) -> dict[str, Any]:
    return {
        "widths": FIGURE_WIDTHS,
        "activation": "tanh",
        "loss": "cross entropy, mean over the batch",
        "iterations": arguments.iterations,
        "batch_size": arguments.batch_size,
        "warm_batches": arguments.warm_batches,
        "block_fisher": {"rates": arguments.lr, "dampings": arguments.damping},
        "decay": 0.9,
        "intervals": "T1 = T2 = 1",
        "dampings": {name: method.dampings for name, method in COMPARED.items()},
        "criterion": "a method's damping, and block Fisher's, is the one with which, at its best "
        "learning rate, it has the lowest smoothed training loss after as many iterations",
        "data": {"examples": len(inputs), "mean": round(inputs.mean().item(), 6)},
    }


def _setting(key: dict[str, Any]) -> str:
    return f"damping {damping_name(key['damping'])}, lr {key['lr']:g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.cosine",
        description="Cosine similarity of each method's direction to block Fisher's, along block "
        "Fisher's run (Figure 1 of the paper). First each method trains itself with every damping "
        "and learning rate of a grid; the picture shows it with the damping that trained best and "
        "with the most similar one, the table all of them.",
    )
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="folder with MNIST's IDX files, raw or .gz, in itself or in MNIST/raw",
    )
    parser.add_argument("--iterations", type=positive_int, metavar="N", help="default: 100")
    parser.add_argument("--batch-size", type=positive_int, metavar="M", help="default: 500")
    parser.add_argument(
        "--warm-batches",
        type=positive_int,
        metavar="N",
        help="batches that all statistics start with the average of (default: 10)",
    )
    parser.add_argument(
        "--seeds",
        type=seed_int,
        nargs="+",
        metavar="S",
        help="of the start, the batches and the sampled labels: one run each (default: 0)",
    )
    parser.add_argument(
        "--lr",
        type=positive_float,
        nargs="+",
        metavar="X",
        help="block Fisher's; of several the one that trains it best (default: 0.01 0.03 0.1)",
    )
    parser.add_argument(
        "--damping",
        type=positive_float,
        nargs="+",
        metavar="X",
        help="likewise (default: 0.001 0.01 0.1)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="5 iterations of 100 images, 2 to start with, one seed"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        default=Path("results/cosine.json"),
        help="the record, gone on with where it exists; the plot is written beside it as .png "
        "(default: results/cosine.json)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
