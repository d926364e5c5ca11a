"""Algorithm 1 beside Theorem 1's bound: `python -m experiments.idealized --help`."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from experiments.problems.softmax_regression import (  # noqa: E402
    Constants,
    Problem,
    constants,
    synthetic_problem,
)
from experiments.runs.command_line import (  # noqa: E402
    checked_output,
    positive_float,
    positive_int,
    seed_int,
)
from experiments.runs.run_file import RunFile  # noqa: E402
from tnt_kernels import damped_inverse, mode_products  # noqa: E402

DATA_SEED = 0  # of the data and the first W, which all runs share


@dataclass
class Point:
    """A run just before a step: t from 1, W, the whole loss, and its gradient's squared norm."""

    t: int
    weights: Tensor
    loss: float
    squared_norm: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # matrices of some dozen rows
    out = checked_output(parser, "--out", arguments.out)
    problem = synthetic_problem(
        arguments.examples, arguments.features, arguments.classes, DATA_SEED
    )
    first = torch.zeros(problem.shape, dtype=torch.float64)
    known = constants(problem, first, arguments.batch_size, arguments.damping)
    try:
        runs = RunFile(out, "idealized", _protocol(arguments, known))
    except (OSError, ValueError) as error:
        parser.error(f"argument --out: {error}")

    settings = [
        (beta, multiple)
        for multiple in dict.fromkeys((1.0, *arguments.multiples))
        for beta in dict.fromkeys(arguments.betas)
    ]
    for beta, multiple in settings:
        for seed in dict.fromkeys(arguments.seeds):
            key = {"beta": beta, "multiple": multiple, "seed": seed}
            if runs.find(key) is None:
                points = idealized_run(
                    problem, first, known, arguments.damping, beta, multiple, seed
                )
                runs.add(key, _averages(points, arguments.iterations, key))

    curves = [
        _curve(runs.runs, known, arguments.iterations, beta, multiple)
        for beta, multiple in settings
    ]
    picture = out.with_suffix(".png")
    _plot(curves, picture, arguments.damping)
    for curve in curves:
        print(_line(curve))
    print(f"wrote {out} and {picture}")
    return 0


def idealized_run(
    problem: Problem,
    first: Tensor,
    known: Constants,
    damping: float,
    beta: float,
    multiple: float,
    seed: int,
) -> Iterator[Point]:
    """Algorithm 1 without end: the minibatch's gradient, preconditioned with exact expectations.

    Args:
        problem: the data, from which minibatches are drawn with replacement.
        first: W at the start; it is left alone.
        known: the theorem's constants, which give the batch size and the step sizes.
        damping: epsilon.
        beta: of the step sizes.
        multiple: the step sizes are so many times the theorem's; above 1 it says nothing of them.
        seed: of the minibatches.
    """
    generator = torch.Generator().manual_seed(seed)
    weights, count, t = first.clone(), len(problem.inputs), 0
    while True:
        t += 1
        probabilities, slopes = problem.example_slopes(weights)
        gradient = slopes.T @ problem.inputs / count
        # the probability of an example's own label is 1 + its slope there
        own = slopes.gather(1, problem.labels.unsqueeze(1)) + 1
        yield Point(t, weights.clone(), -own.log().mean().item(), gradient.square().sum().item())
        batch = torch.randint(count, (known.batch_size,), generator=generator)
        noisy = slopes[batch].T @ problem.inputs[batch] / known.batch_size
        factors, _ = damped_inverse([problem.expected_grams(probabilities)], damping)
        direction = mode_products([noisy], factors)[0]
        weights = weights - multiple * known.step_size(t, beta) * direction


def recorded_at(iterations: int) -> list[int]:
    """Some fifty N from 1 to `iterations`, evenly spaced on a logarithmic axis."""
    points = {round(iterations ** (step / 49)) for step in range(50)}
    return sorted(points)


def _averages(points: Iterator[Point], iterations: int, key: dict[str, Any]) -> dict[str, Any]:
    """The averages over t <= N of the squared gradient norms, and the losses at N."""
    label = f"beta {key['beta']}, x{key['multiple']:g}, seed {key['seed']}"
    wanted, total = set(recorded_at(iterations)), 0.0
    averages: list[float] = []
    losses: list[float] = []
    largest = -math.inf
    for _ in tqdm(range(iterations), label, leave=False, disable=None):
        point = next(points)
        total += point.squared_norm
        largest = max(largest, point.loss)
        if point.t in wanted:
            averages.append(float(f"{total / point.t:.6g}"))
            losses.append(float(f"{point.loss:.6g}"))
    return {"averages": averages, "losses": losses, "largest_loss": largest}


def _curve(
    runs: Sequence[dict[str, Any]],
    known: Constants,
    iterations: int,
    beta: float,
    multiple: float,
) -> dict[str, Any]:
    """The mean over the seeds, which estimates the theorem's expectation, beside the bound."""
    chosen = [
        run for run in runs if run["key"]["beta"] == beta and run["key"]["multiple"] == multiple
    ]
    columns = zip(*(run["averages"] for run in chosen), strict=True)
    counts = recorded_at(iterations)
    return {
        "beta": beta,
        "multiple": multiple,
        "seeds": len(chosen),
        "counts": counts,
        "averages": [statistics.fmean(column) for column in columns],
        "bounds": [known.bound(count, beta) for count in counts],
        "final_loss": statistics.fmean(run["losses"][-1] for run in chosen),
        "largest_loss": max(run["largest_loss"] for run in chosen),
        "loss_bound": known.largest_loss(beta),
    }


def _line(curve: dict[str, Any]) -> str:
    average, bound = curve["averages"][-1], curve["bounds"][-1]
    start = (
        f"beta {curve['beta']:<5g} steps x{curve['multiple']:<5g} N {curve['counts'][-1]}: "
        f"average |gradient|^2 {average:.3e}, final loss {curve['final_loss']:.4f}"
    )
    if curve["multiple"] > 1:
        return f"{start} (outside the theorem)"
    pairs = zip(curve["averages"], curve["bounds"], strict=True)
    holds = all(value <= limit for value, limit in pairs)
    return (
        f"{start}, bound {bound:.3e}, {bound / average:.0f} times as much; "
        f"it {'holds' if holds else 'DOES NOT HOLD'} at every N"
    )


def _plot(curves: Sequence[dict[str, Any]], path: Path, damping: float) -> None:
    """Averages (solid) and bounds (dashed) against N; other step sizes dotted."""
    figure, axes = pyplot.subplots(figsize=(9.6, 4.6), layout="constrained")
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    betas = list(dict.fromkeys(curve["beta"] for curve in curves))
    for curve in curves:
        colour = colours[betas.index(curve["beta"]) % len(colours)]
        label = f"$\\beta$ = {curve['beta']:g}"
        inside = curve["multiple"] <= 1
        if not inside:
            label += f", steps x{curve['multiple']:g}\n(outside the theorem)"
        axes.loglog(
            curve["counts"],
            curve["averages"],
            color=colour,
            linestyle="-" if inside else ":",
            label=label,
        )
        if inside:
            axes.loglog(
                curve["counts"],
                curve["bounds"],
                color=colour,
                linestyle="--",
                label=f"Theorem 1's bound, $\\beta$ = {curve['beta']:g}",
            )
    axes.set_xlabel("iterations N")
    axes.set_ylabel("squared gradient norm, average over t $\\leq$ N")
    axes.set_title(f"Idealized TNT on softmax regression, damping {damping:g}", fontsize=11)
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _protocol(arguments: argparse.Namespace, known: Constants) -> dict[str, Any]:
    return {
        "problem": "softmax regression on synthetic data, W starts at zero",
        "examples": arguments.examples,
        "features": arguments.features,
        "classes": arguments.classes,
        "data_seed": DATA_SEED,
        "batch_size": arguments.batch_size,
        "damping": arguments.damping,
        "iterations": arguments.iterations,
        "recorded_at": recorded_at(arguments.iterations),
        "constants": {name: float(f"{v:.9g}") for name, v in asdict(known).items()},
        "largest_loss": "M_L is the start's loss and what the steps' noise can add to it",
    }


def _step_exponent(text: str) -> float:
    """An argparse type: a number between 0.5 and 1."""
    value = positive_float(text)
    if not 0.5 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0.5 and below 1, got {text}")
    return value


def _large_multiple(text: str) -> float:
    """An argparse type: a finite number above 1."""
    value = positive_float(text)
    if value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 1, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.idealized",
        description="The idealized TNT (Algorithm 1 of the paper: exact expectations) on softmax "
        "regression, with Theorem 1's step sizes: the averaged squared gradient norm beside the "
        "theorem's bound. All constants are valid for every W, none is fitted.",
    )
    parser.add_argument("--iterations", type=positive_int, default=3000, metavar="N")
    parser.add_argument("--betas", type=_step_exponent, nargs="+", default=[0.55, 0.75, 0.95])
    parser.add_argument(
        "--multiples",
        type=_large_multiple,
        nargs="*",
        default=[100.0],
        help="also with so many times the theorem's step sizes, outside of it (default: 100)",
    )
    parser.add_argument("--seeds", type=seed_int, nargs="+", default=[0, 1, 2, 3, 4], metavar="S")
    parser.add_argument("--batch-size", type=positive_int, default=10, metavar="M")
    parser.add_argument("--damping", type=positive_float, default=0.3, help="epsilon")
    parser.add_argument("--examples", type=positive_int, default=500)
    parser.add_argument("--features", type=positive_int, default=12)
    parser.add_argument("--classes", type=positive_int, default=5)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        default=Path("results/idealized.json"),
        help="the record, gone on with where it exists; the plot is written beside it as .png "
        "(default: results/idealized.json)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
