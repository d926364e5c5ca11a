"""Every operator on a set of tensors: our call, the same in plain torch, and the right results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import (
    backends,
    damped_inverse,
    grafted_directions_,
    gram_ema_,
    inverse_root,
    mode_products,
    preconditioned_step_,
    reference,
    scaled_step_,
)
from tnt_kernels.benchmark import baselines
from tnt_kernels.benchmark.comparison import OURS, Candidate
from tnt_kernels.benchmark.inputs import (
    Modes,
    TensorSet,
    copies,
    flat,
    generator,
    gram_statistics,
    in_float64,
    normal,
    poisoned,
    symmetric_modes,
)
from tnt_kernels.benchmark.work import (
    Work,
    entries_growth,
    factors_growth,
    grafted_work,
    gram_work,
    inverse_work,
    products_growth,
    products_work,
    root_work,
    scaled_work,
    step_work,
    whitened_work,
)

DECAY, DAMPING = 0.9, 0.1  # beta and epsilon in the paper
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.1
SECOND_DECAY, EPS, UPDATES = 0.99, 1e-8, 10  # Adam's, as grafted on


@dataclass
class Problem:
    """One operator on one set of tensors."""

    candidates: list[Candidate]  # ours first
    expected: list[Tensor]  # the results of one run, in float64


@dataclass(frozen=True)
class Operator:
    """What is known of an operator before there are tensors."""

    problem: Callable[[TensorSet, torch.device], Problem]
    work: Callable[[TensorSet], Work]
    growth: Callable[[TensorSet], int]  # its time is proportional to this, by Table 2 of the paper


def writing(name: str, write: Callable[[Modes], object], modes: Modes, graph: bool) -> Candidate:
    """A candidate that writes matrices of the shapes of ``modes``."""
    out = poisoned(modes)
    return Candidate(name, lambda: write(out), lambda: flat(out), graph=graph)


def gram(tensor_set: TensorSet, device: torch.device, whitened: bool = False) -> Problem:
    """Refresh all statistics once; whitened, as the default TNT does."""
    rng = generator(device)
    tensors, start = normal(tensor_set.views, rng), symmetric_modes(tensor_set, rng)
    factors = [symmetric_modes(tensor_set, rng)] if whitened else []
    expected, wide = in_float64(start), [tensor.double() for tensor in tensors]
    reference.gram_ema_(expected, wide, DECAY, *map(in_float64, factors))

    def candidate(name: str, update: Callable[..., None]) -> Candidate:
        stats = copies(start)
        return Candidate(
            name,
            run=lambda: update(stats, tensors, DECAY, *factors),
            results=lambda: flat(stats),
            updated=flat(stats),
        )

    candidates = [candidate(OURS, gram_ema_)]
    if whitened:
        candidates.append(candidate("tensordot + matmul", baselines.gram_whitened_))
        return Problem(candidates, flat(expected))
    candidates.append(candidate("einsum + lerp_", baselines.gram_einsum_))
    candidates.append(candidate("addmm_", baselines.gram_addmm_))
    return Problem(candidates, flat(expected))


def inverse(tensor_set: TensorSet, device: torch.device) -> Problem:
    """Refresh all inverses once, in place of the old ones."""
    stats = gram_statistics(tensor_set, generator(device))
    expected, info = reference.damped_inverse(in_float64(stats), DAMPING)
    assert not info.any()

    def candidate(name: str, invert: Callable[..., object], graph: bool = False) -> Candidate:
        return writing(name, lambda out: invert(stats, DAMPING, out), stats, graph)

    candidates = [
        candidate(OURS, damped_inverse, graph=True),
        candidate("linalg.inv", baselines.inverse_linalg),
        candidate("cholesky_inverse", baselines.inverse_cholesky),
    ]
    return Problem(candidates, flat(expected))


def root(tensor_set: TensorSet, device: torch.device) -> Problem:
    """Refresh all roots once, 1 / 2k for k modes as in Shampoo.

    The right results are those of eigenvalues in float64. The reference's Newton iteration agrees
    to 1e-6 and takes some hundred d^3.
    """
    stats = gram_statistics(tensor_set, generator(device))
    roots = [2 * len(view) for view in tensor_set.views]
    wide = in_float64(stats)
    expected = poisoned(wide)
    baselines.root_eigh(wide, DAMPING, roots, expected)
    served = backends().ops["inverse_root"][device.type]

    def candidate(name: str, make: Callable[..., object], graph: bool = False) -> Candidate:
        return writing(name, lambda out: make(stats, DAMPING, roots, out), stats, graph)

    candidates = [
        candidate(OURS, inverse_root, graph=served != "reference"),
        candidate("linalg.eigh", baselines.root_eigh),
    ]
    return Problem(candidates, flat(expected))


def products(tensor_set: TensorSet, device: torch.device) -> Problem:
    """Multiply every tensor by its factors once, into new tensors."""
    rng = generator(device)
    tensors, factors = normal(tensor_set.views, rng), symmetric_modes(tensor_set, rng)

    def candidate(
        name: str, multiply: Callable[[Sequence[Tensor], Modes], list[Tensor]]
    ) -> Candidate:
        kept: list[list[Tensor]] = [[]]

        def run() -> None:
            kept[0] = []  # an optimizer has freed its last directions, too
            kept[0] = multiply(tensors, factors)

        return Candidate(name, run, lambda: kept[0])

    candidates = [
        candidate(OURS, mode_products),
        candidate("tensordot", baselines.products_tensordot),
    ]
    if any(tensor.dim() == 2 for tensor in tensors):
        candidates.append(candidate("A @ G @ B", baselines.products_matmul))
    expected = reference.mode_products([t.double() for t in tensors], in_float64(factors))
    return Problem(candidates, expected)


def step(tensor_set: TensorSet, device: torch.device) -> Problem:
    """Momentum, products, decay and update of all parameters once."""
    rng, views = generator(device), tensor_set.views
    weights, momenta, grads = normal(views, rng, 0.1), normal(views, rng), normal(views, rng)
    factors = symmetric_modes(tensor_set, rng)
    scalars = (LR, MOMENTUM, WEIGHT_DECAY)
    expected, wide_momenta, wide_grads = in_float64([weights, momenta, grads])
    reference.preconditioned_step_(
        expected, wide_momenta, wide_grads, in_float64(factors), *scalars
    )

    def candidate(name: str, update: Callable[..., None]) -> Candidate:
        own_weights, own_momenta = copies([weights, momenta])
        return Candidate(
            name,
            run=lambda: update(own_weights, own_momenta, grads, factors, *scalars),
            results=lambda: [*own_weights, *own_momenta],
            updated=own_weights,
        )

    return Problem(
        [
            candidate(OURS, preconditioned_step_),
            candidate("tensordot + foreach", baselines.step_tensordot_),
        ],
        [*expected, *wide_momenta],
    )


def grafted(tensor_set: TensorSet, device: torch.device) -> Problem:
    """Momentum, Adam's second moment, products and norms of all parameters once."""
    rng, views = generator(device), tensor_set.views
    momenta, grads = normal(views, rng), normal(views, rng)
    squares = [tensor.square() for tensor in normal(views, rng)]
    factors = symmetric_modes(tensor_set, rng)
    counts = torch.full((len(views), 2), float(UPDATES), dtype=torch.float64)
    adam: dict[str, Any] = {"second_decay": SECOND_DECAY, "eps": EPS}
    wide_momenta, wide_grads, wide_squares = in_float64([momenta, grads, squares])
    directions, norms = reference.grafted_directions_(
        wide_momenta, wide_grads, in_float64(factors), MOMENTUM, wide_squares, counts, **adam
    )

    def candidate(
        name: str, direct: Callable[..., tuple[list[Tensor], Tensor]], **options: object
    ) -> Candidate:
        own_momenta, own_squares = copies([momenta, squares])
        kept: list[Tensor] = []

        def run() -> None:
            directions, norms = direct(
                own_momenta, grads, factors, MOMENTUM, own_squares, counts, **adam, **options
            )
            kept[:] = [*directions, *norms.unbind(1)]

        return Candidate(name, run, lambda: [*kept, *own_momenta, *own_squares])

    return Problem(
        [
            # An optimizer reuses the memory of its directions.
            candidate(OURS, grafted_directions_, out=[torch.empty_like(m) for m in momenta]),
            candidate("tensordot + foreach", baselines.grafted_tensordot_),
        ],
        [*directions, *norms.unbind(1), *wide_momenta, *wide_squares],
    )


def scaled(tensor_set: TensorSet, device: torch.device) -> Problem:
    """The update of all parameters with a scale for each; biases do not decay."""
    rng, views = generator(device), tensor_set.views
    weights, directions = normal(views, rng, 0.1), normal(views, rng)
    (scales,) = normal([[len(views)]], rng)
    table = scales.square().double()
    decayed = [len(view) > 1 for view in views]
    (expected, wide_directions) = in_float64([weights, directions])
    reference.scaled_step_(expected, wide_directions, LR, WEIGHT_DECAY, decayed, table)

    def candidate(name: str, update: Callable[..., None]) -> Candidate:
        (params,) = copies([weights])
        return Candidate(
            name,
            run=lambda: update(params, directions, LR, WEIGHT_DECAY, decayed, table),
            results=lambda: params,
            updated=params,
        )

    return Problem(
        [candidate(OURS, scaled_step_), candidate("foreach", baselines.scaled_foreach_)],
        expected,
    )


OPERATORS: dict[str, Operator] = {
    "gram_ema_": Operator(gram, gram_work, products_growth),
    "gram_ema_ whitened": Operator(
        functools.partial(gram, whitened=True), whitened_work, products_growth
    ),
    "damped_inverse": Operator(inverse, inverse_work, factors_growth),
    "preconditioned_step_": Operator(step, step_work, products_growth),
    "grafted_directions_": Operator(grafted, grafted_work, products_growth),
    "scaled_step_": Operator(scaled, scaled_work, entries_growth),
    "mode_products": Operator(products, products_work, products_growth),
    "inverse_root": Operator(root, root_work, factors_growth),
}
