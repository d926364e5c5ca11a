"""Softmax regression with every expectation exact, and the constants of the paper's Theorem 1.

The model has one tensor variable, W (classes, features): the theorem is stated for one. Everything
is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Problem:
    """Data whose uniform distribution is the whole truth.

    Attributes:
        inputs: (N, features), float64.
        labels: (N,), int64.
        classes: how many classes there are.
    """

    inputs: Tensor
    labels: Tensor
    classes: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of W: (classes, features)."""
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


def synthetic_problem(examples: int, features: int, classes: int, seed: int) -> Problem:
    """Gaussian inputs of decaying variance, scaled to a mean square of 1, and a random W's labels.

    The labels are drawn from a softmax regression, so no W gives them all.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.arange(1, features + 1, dtype=torch.float64).rsqrt()
    inputs = scales * torch.randn(examples, features, dtype=torch.float64, generator=generator)
    inputs /= inputs.square().sum(dim=1).mean().sqrt()
    truth = 4 * torch.randn(classes, features, dtype=torch.float64, generator=generator)
    chances = (inputs @ truth.T).softmax(dim=1)
    labels = torch.multinomial(chances, 1, generator=generator).squeeze(1)
    return Problem(inputs, labels, classes)


@dataclass(frozen=True)
class Constants:
    """What Theorem 1 assumes to exist, for softmax regression from below and above.

    Attributes:
        lipschitz: L, of the loss's gradient.
        lowest: a lower bound of the loss.
        first: the loss at the first W.
        noise: sigma^2, of one example's gradient around the whole one.
        batch_size: m.
        kappa_low: H = F_TNT^-1 is at least kappa_low I at every W.
        kappa_high: H is at most kappa_high I.
    """

    lipschitz: float
    lowest: float
    first: float
    noise: float
    batch_size: int
    kappa_low: float
    kappa_high: float

    def step_size(self, t: int, beta: float) -> float:
        """alpha_t = kappa_low / (L kappa_high^2) t^-beta, for t = 1, 2, ..."""
        return float(self.kappa_low / (self.lipschitz * self.kappa_high**2) * t**-beta)

    def largest_loss(self, beta: float) -> float:
        """M_L: no expected loss of the run is above it.

        A step adds at most L kappa_high^2 alpha_t^2 sigma^2 / (2 m) to the expected loss (its
        gradient's part only lowers it), and sum_t t^(-2 beta) <= 1 + 1 / (2 beta - 1).
        """
        squares = 1 + 1 / (2 * beta - 1)
        growth = self.lipschitz * self.kappa_high**2 * self.step_size(1, beta) ** 2 / 2
        return self.first + growth * self.noise / self.batch_size * squares

    def bound(self, count: int, beta: float) -> float:
        """The right side of Theorem 1 for N = `count`: of the averaged squared gradient norm.

        Its second term as the paper has it: as a bound of the noise's part alone it lacks
        sigma^2 / (m N), because the sum of t^-beta from 1 to N is above, not below, the integral
        between the same limits.
        """
        ratio = (self.kappa_high / self.kappa_low) ** 2
        descent = 2 * self.lipschitz * (self.largest_loss(beta) - self.lowest) * ratio
        noise = self.noise / ((1 - beta) * self.batch_size)
        return float(descent * count ** (beta - 1) + noise * (count**-beta - 1 / count))

    def safe_bound(self, count: int, beta: float) -> float:
        """`bound` with the sigma^2 / (m N) that a proof of it needs."""
        return self.bound(count, beta) + self.noise / (self.batch_size * count)


def constants(problem: Problem, first: Tensor, batch_size: int, damping: float) -> Constants:
    """Valid constants for every W, in closed form.

    - The Hessian, which is the Fisher matrix too, is E[(diag(p) - p p^T) kron x x^T], and
      diag(p) - p p^T <= I / 2: so L = lambda_max(E[x x^T]) / 2.
    - An example's gradient has squared norm |p - e_y|^2 |x|^2 <= 2 |x|^2: so sigma^2 = 2 E|x|^2.
    - |E[G^(1)]| <= E|x|^2 / 2, and |E[G^(2)]| <= (1 - 1 / classes) lambda_max(E[x x^T]), as 1 -
      |p|^2 is at most 1 - 1 / classes. Lemma 9's proof turns them into a bound of F_TNT:
      |U_i| <= d_i |E[G^(i)]|^(1/2) / (d_1 d_2)^(1/2).
    - U_i >= 0: so kappa_high = damping^-2.

    Args:
        problem: the data.
        first: W at the start.
        batch_size: m.
        damping: epsilon, positive.
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
