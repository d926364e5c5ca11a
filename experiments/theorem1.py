"""Theorem 1: Algorithm 1, the idealized TNT with exact expectations, and the theorem's bound.

The problem is softmax regression with one tensor variable, W (classes, features): the theorem is
stated for one. Everything is float64. All constants are valid for every W; none is fitted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from experiments import options
from experiments.options import Quick, numbers, user_errors
from experiments.plots import plain_axes, save
from experiments.run_files import RunFile
from tnt_kernels import damped_inverse, mode_products

QUICK = [Quick("theorem1", "--steps 1000 --seeds 0,1,2")]

BETAS = (0.55, 0.75, 0.95)
# Multiples of the theorem's step sizes; the theorem does not cover a multiple above 1.
MULTIPLES = (1.0, 100.0)
SIZES = {"examples": 500, "features": 12, "classes": 5}
BATCH_SIZE = 10
DAMPING = 0.3
DATA_SEED = 0  # of the data; W starts at zero in all runs


def main(
    seeds: options.Seeds = "0,1,2,3,4",
    steps: options.Steps = 3000,
    out: options.Out = None,
) -> None:
    """Theorem 1: the averaged squared gradient norm of the idealized TNT below its bound."""
    options.set_machine(1)  # its matrices have a dozen rows
    out = out or Path("results/theorem1.json")
    problem = synthetic_problem(**SIZES, seed=DATA_SEED)
    first = torch.zeros(problem.shape, dtype=torch.float64)
    known = constants(problem, first, BATCH_SIZE, DAMPING)
    rounded = {name: float(f"{v:.9g}") for name, v in asdict(known).items()}
    protocol = {**SIZES, "damping": DAMPING, "steps": steps, **rounded}
    with user_errors():
        file = RunFile(out, "theorem 1", protocol)
    settings = [(beta, multiple) for multiple in MULTIPLES for beta in BETAS]
    for beta, multiple in settings:
        for seed in numbers(seeds):
            key = {"beta": beta, "multiple": multiple, "seed": seed}
            if file.find(key) is None:
                points = idealized_run(problem, first, known, DAMPING, beta, multiple, seed)
                file.add(key, averages(points, steps))
    curves = [curve(file.runs, known, steps, beta, multiple) for beta, multiple in settings]
    plot(curves, out.with_suffix(".png"))
    for one in curves:
        print(_line(one))
    print(f"wrote {out} and {out.with_suffix('.png')}")


@dataclass(frozen=True)
class SoftmaxRegression:
    """Data; their uniform distribution is the true one."""

    inputs: Tensor  # (N, features), float64
    labels: Tensor  # (N,), int64
    classes: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of W: (classes, features)."""
        return self.classes, self.inputs.shape[1]

    def loss(self, weights: Tensor) -> float:
        """Cross entropy, mean over the data; weights (classes, features)."""
        return functional.cross_entropy(self.inputs @ weights.T, self.labels).item()

    def example_slopes(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Each example's probabilities p, and p - e_y at its label; both (N, classes).

        The gradient of an example's loss is (p - e_y) x^T.
        """
        probabilities = (self.inputs @ weights.T).softmax(dim=1)
        slopes = probabilities.clone()
        slopes[torch.arange(len(self.labels)), self.labels] -= 1
        return probabilities, slopes

    def expected_grams(self, probabilities: Tensor) -> list[Tensor]:
        """E[G^(1)] and E[G^(2)] of G = (p - e_y) x^T, over x in the data and y ~ p(.|x).

        Summed over the labels by hand: E_y[(p - e_y)(p - e_y)^T] = diag(p) - p p^T.

        probabilities: (N, classes); returns (classes, classes) and (features, features).
        """
        count = len(self.inputs)
        lengths = self.inputs.square().sum(dim=1, keepdim=True)
        weighted = probabilities * lengths / count
        by_class = torch.diag(weighted.sum(dim=0)) - weighted.T @ probabilities
        spread = (1 - probabilities.square().sum(dim=1, keepdim=True)) / count
        return [by_class, (self.inputs * spread).T @ self.inputs]


def synthetic_problem(examples: int, features: int, classes: int, seed: int) -> SoftmaxRegression:
    """Gaussian inputs of decaying variance, scaled to a mean square of 1, and random labels.

    A softmax regression with a random W draws the labels, so no W predicts them all.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.arange(1, features + 1, dtype=torch.float64).rsqrt()
    inputs = scales * torch.randn(examples, features, dtype=torch.float64, generator=generator)
    inputs /= inputs.square().sum(dim=1).mean().sqrt()
    truth = 4 * torch.randn(classes, features, dtype=torch.float64, generator=generator)
    chances = (inputs @ truth.T).softmax(dim=1)
    labels = torch.multinomial(chances, 1, generator=generator).squeeze(1)
    return SoftmaxRegression(inputs, labels, classes)


@dataclass(frozen=True)
class Constants:
    """The constants in Theorem 1, for softmax regression. H is F_TNT^-1."""

    lipschitz: float  # L, of the loss's gradient
    lowest: float  # a lower bound of the loss
    first: float  # the loss at the first W
    noise: float  # sigma^2, of one example's gradient around the whole gradient
    batch_size: int  # m
    kappa_low: float  # H >= kappa_low I at every W
    kappa_high: float  # H <= kappa_high I at every W

    def step_size(self, t: int, beta: float) -> float:
        """alpha_t = kappa_low / (L kappa_high^2) t^-beta, for t = 1, 2, ..."""
        return float(self.kappa_low / (self.lipschitz * self.kappa_high**2) * t**-beta)

    def largest_loss(self, beta: float) -> float:
        """M_L: an upper bound of the expected losses of the run.

        A step adds at most L kappa_high^2 alpha_t^2 sigma^2 / (2 m) to the expected loss (the
        part of the whole gradient only lowers it), and sum_t t^(-2 beta) <= 1 + 1 / (2 beta - 1).
        """
        squares = 1 + 1 / (2 * beta - 1)
        growth = self.lipschitz * self.kappa_high**2 * self.step_size(1, beta) ** 2 / 2
        return self.first + growth * self.noise / self.batch_size * squares

    def bound(self, count: int, beta: float) -> float:
        """The right side of Theorem 1 for N = `count`, for the averaged squared gradient norm.

        The second term is the paper's. Its proof needs sigma^2 / (m N) more, because the sum of
        t^-beta from 1 to N is above the integral between the same limits.
        """
        ratio = (self.kappa_high / self.kappa_low) ** 2
        descent = 2 * self.lipschitz * (self.largest_loss(beta) - self.lowest) * ratio
        noise = self.noise / ((1 - beta) * self.batch_size)
        return float(descent * count ** (beta - 1) + noise * (count**-beta - 1 / count))


def constants(
    problem: SoftmaxRegression, first: Tensor, batch_size: int, damping: float
) -> Constants:
    """Valid constants for every W, in closed form.

    - The Hessian, which is the Fisher matrix too, is E[(diag(p) - p p^T) kron x x^T], and
      diag(p) - p p^T <= I / 2: so L = lambda_max(E[x x^T]) / 2.
    - An example's gradient has squared norm |p - e_y|^2 |x|^2 <= 2 |x|^2: so sigma^2 = 2 E|x|^2.
    - |E[G^(1)]| <= E|x|^2 / 2, and |E[G^(2)]| <= (1 - 1 / classes) lambda_max(E[x x^T]), as 1 -
      |p|^2 is at most 1 - 1 / classes. Lemma 9's proof turns them into a bound of F_TNT:
      |U_i| <= d_i |E[G^(i)]|^(1/2) / (d_1 d_2)^(1/2).
    - U_i >= 0: so kappa_high = damping^-2.
    """
    classes, features = problem.shape
    second_moment = problem.inputs.T @ problem.inputs / len(problem.inputs)
    largest = torch.linalg.eigvalsh(second_moment)[-1].item()
    length = second_moment.trace().item()
    grams = (length / 2, (1 - 1 / classes) * largest)
    upper = 1.0
    for d, gram in zip((classes, features), grams, strict=True):
        upper *= d * math.sqrt(gram / (classes * features)) + damping
    return Constants(
        lipschitz=largest / 2,
        lowest=0.0,
        first=problem.loss(first),
        noise=2 * length,
        batch_size=batch_size,
        kappa_low=1 / upper,
        kappa_high=damping**-2,
    )


@dataclass
class Point:
    """A run just before a step: t from 1, W, the whole loss, and its gradient's squared norm."""

    t: int
    weights: Tensor
    loss: float
    squared_norm: float


def idealized_run(
    problem: SoftmaxRegression,
    first: Tensor,
    known: Constants,
    damping: float,
    beta: float,
    multiple: float,
    seed: int,
) -> Iterator[Point]:
    """Algorithm 1 without end: the minibatch's gradient, preconditioned with exact expectations.

    Minibatches of `known.batch_size` are drawn with replacement, from `seed`. W starts at `first`,
    which does not change. The step sizes are `multiple` times the theorem's.
    """
    generator = torch.Generator().manual_seed(seed)
    weights, count, t = first.clone(), len(problem.inputs), 0
    while True:
        t += 1
        probabilities, slopes = problem.example_slopes(weights)
        gradient = slopes.T @ problem.inputs / count
        # The probability of an example's own label is 1 + its slope there.
        own = slopes.gather(1, problem.labels.unsqueeze(1)) + 1
        yield Point(t, weights.clone(), -own.log().mean().item(), gradient.square().sum().item())
        batch = torch.randint(count, (known.batch_size,), generator=generator)
        noisy = slopes[batch].T @ problem.inputs[batch] / known.batch_size
        factors, _ = damped_inverse([problem.expected_grams(probabilities)], damping)
        direction = mode_products([noisy], factors)[0]
        weights = weights - multiple * known.step_size(t, beta) * direction


def recorded_at(steps: int) -> list[int]:
    """Some fifty N from 1 to `steps`, evenly spaced on a logarithmic axis."""
    return sorted({round(steps ** (step / 49)) for step in range(50)})


def averages(points: Iterator[Point], steps: int) -> dict[str, Any]:
    """The averages over t <= N of the squared gradient norms, and the last loss."""
    wanted, total = set(recorded_at(steps)), 0.0
    means: list[float] = []
    bar = tqdm(islice(points, steps), total=steps, leave=False, disable=None)
    for point in bar:
        bar.set_postfix_str(f"loss {point.loss:.4g}", refresh=False)
        total += point.squared_norm
        if point.t in wanted:
            means.append(float(f"{total / point.t:.6g}"))
    return {"averages": means, "final_loss": float(f"{point.loss:.6g}")}


def curve(
    runs: Sequence[Mapping[str, Any]], known: Constants, steps: int, beta: float, multiple: float
) -> dict[str, Any]:
    """The mean over the seeds, which estimates the theorem's expectation, and the bound."""
    wanted = {"beta": beta, "multiple": multiple}
    chosen = [run for run in runs if wanted.items() <= run["key"].items()]
    counts = recorded_at(steps)
    return {
        **wanted,
        "counts": counts,
        "averages": list(map(statistics.fmean, zip(*(r["averages"] for r in chosen), strict=True))),
        "bounds": [known.bound(count, beta) for count in counts],
        "final_loss": statistics.fmean(run["final_loss"] for run in chosen),
    }


def _line(curve: Mapping[str, Any]) -> str:
    average, bound = curve["averages"][-1], curve["bounds"][-1]
    start = (
        f"beta {curve['beta']:<5g} steps x{curve['multiple']:<5g} N {curve['counts'][-1]}: "
        f"average |gradient|^2 {average:.3e}, final loss {curve['final_loss']:.4f}"
    )
    if curve["multiple"] > 1:
        return f"{start} (outside the theorem)"
    pairs = zip(curve["averages"], curve["bounds"], strict=True)
    verdict = "holds" if all(own <= limit for own, limit in pairs) else "DOES NOT HOLD"
    return f"{start}, bound {bound:.3e} ({bound / average:.0f} times) {verdict} at every N"


def plot(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw averages (solid) and bounds (dashed) against N; larger step sizes are dotted."""
    figure, axes = pyplot.subplots(figsize=(9.6, 4.6), layout="constrained")
    colours = dict(zip(BETAS, ("#0072B2", "#D55E00", "#009E73"), strict=True))
    for one in curves:
        colour, inside = colours[one["beta"]], one["multiple"] <= 1
        label = f"$\\beta$ = {one['beta']:g}"
        label += "" if inside else f", steps x{one['multiple']:g}\n(outside the theorem)"
        line = "-" if inside else ":"
        axes.loglog(one["counts"], one["averages"], color=colour, linestyle=line, label=label)
        if inside:
            label = f"Theorem 1's bound, $\\beta$ = {one['beta']:g}"
            axes.loglog(one["counts"], one["bounds"], color=colour, linestyle="--", label=label)
    axes.set_xlabel("iterations N")
    axes.set_ylabel("squared gradient norm, average over t $\\leq$ N")
    plain_axes(axes)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save(figure, path, f"Idealized TNT on softmax regression, damping {DAMPING:g}")
