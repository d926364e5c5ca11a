"""What is timed against what, of every operator: inputs, candidates, the expected results.

Inputs are drawn on the device, the reference runs there too, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.gpu import device_baselines
from bench.kernels import baselines
from bench.kernels.inputs import Modes, copies, empty_like, flat, normal, symmetric_modes
from bench.kernels.timing import OURS, Candidate
from bench.kernels.work import Work, gram_work, inverse_work, products_work, step_work
from tnt_kernels import (
    backends,
    damped_inverse,
    gram_ema_,
    inverse_root,
    mode_products,
    preconditioned_step_,
    reference,
)
from tools.measuring.parameter_sets import ParameterSet

DECAY, DAMPING = 0.9, 0.1  # beta and epsilon in the paper
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.1
READS_ON_THE_HOST = "it reads an error code, or an error, on the host"


@dataclass
class Comparison:
    """Candidates of one operator on one parameter set, ours first.

    Attributes:
        candidates: each on its own copies of what it changes.
        expected: what one run gives, in float64.
        work: of one run.
        refused: candidate -> why it cannot be captured in a graph.
        note: to be said beside the numbers.
    """

    candidates: list[Candidate]
    expected: list[Tensor]
    work: Work
    refused: dict[str, str] = field(default_factory=dict)
    note: str = ""


Make = Callable[[ParameterSet, torch.device], Comparison]


def in_float64(modes: Sequence[Sequence[Tensor]]) -> Modes:
    """Copies in float64."""
    return [[matrix.double() for matrix in row] for row in modes]


def gram_statistics(parameter_set: ParameterSet, device: torch.device) -> Modes:
    """The Gram matrices of one normal gradient, by the reference, scaled as on the CPU."""
    rng = torch.Generator(device).manual_seed(0)
    with device:
        tensors = normal(parameter_set.views, rng)
    result = []
    for tensor, kinds in zip(tensors, parameter_set.diagonal, strict=True):
        tensor.mul_(math.sqrt(max(tensor.shape) / tensor.numel()))
        row = [
            torch.empty((d,) if flat_ else (d, d), dtype=torch.float64, device=device)
            for d, flat_ in zip(tensor.shape, kinds, strict=True)
        ]
        reference.gram_ema_([row], [tensor.double()], 0.0)
        result.append([stat.float() for stat in row])
    return result


def gram(parameter_set: ParameterSet, device: torch.device) -> Comparison:
    """All statistics of the set refreshed once."""
    rng = torch.Generator(device).manual_seed(0)
    with device:
        tensors = normal(parameter_set.views, rng)
        start = symmetric_modes(parameter_set, rng)
    expected = in_float64(start)
    reference.gram_ema_(expected, [tensor.double() for tensor in tensors], DECAY)

    def candidate(name: str, update: Callable[..., None]) -> Candidate:
        stats = copies(start)
        return Candidate(
            name,
            run=lambda: update(stats, tensors, DECAY),
            results=lambda: flat(stats),
            moving=flat(stats),
        )

    return Comparison(
        [
            candidate(OURS, gram_ema_),
            candidate("einsum + lerp_", baselines.gram_einsum_),
            candidate("addmm_", baselines.gram_addmm_),
        ],
        flat(expected),
        gram_work(parameter_set.views, parameter_set.diagonal),
    )


def step(parameter_set: ParameterSet, device: torch.device) -> Comparison:
    """All parameters of the set moved once."""
    rng = torch.Generator(device).manual_seed(0)
    views = parameter_set.views
    with device:
        weights, momenta, grads = normal(views, rng, 0.1), normal(views, rng), normal(views, rng)
        factors = symmetric_modes(parameter_set, rng)
    wide, wide_momenta, wide_grads = in_float64([weights, momenta, grads])
    scalars = (LR, MOMENTUM, WEIGHT_DECAY)
    reference.preconditioned_step_(wide, wide_momenta, wide_grads, in_float64(factors), *scalars)

    def candidate(name: str, move: Callable[..., None]) -> Candidate:
        own_weights, own_momenta = copies([weights, momenta])
        return Candidate(
            name,
            run=lambda: move(own_weights, own_momenta, grads, factors, *scalars),
            results=lambda: [*own_weights, *own_momenta],
            moving=own_weights,
        )

    return Comparison(
        [
            candidate(OURS, preconditioned_step_),
            candidate("tensordot + foreach", baselines.step_tensordot_),
        ],
        [*wide, *wide_momenta],
        step_work(views, parameter_set.diagonal),
    )


def products(parameter_set: ParameterSet, device: torch.device) -> Comparison:
    """Every tensor of the set multiplied by its factors once, into new tensors."""
    rng = torch.Generator(device).manual_seed(0)
    with device:
        tensors = normal(parameter_set.views, rng)
        factors = symmetric_modes(parameter_set, rng)
    wide = reference.mode_products([t.double() for t in tensors], in_float64(factors))

    def candidate(name: str, multiply: Callable[..., list[Tensor]]) -> Candidate:
        kept: list[list[Tensor]] = [[]]

        def run() -> None:
            kept[0] = []  # as in a step, where the last directions are gone
            kept[0] = multiply(tensors, factors)

        return Candidate(name, run, lambda: kept[0])

    return Comparison(
        [candidate(OURS, mode_products), candidate("tensordot", baselines.products_tensordot)],
        wide,
        products_work(parameter_set.views, parameter_set.diagonal),
    )


def inverse(parameter_set: ParameterSet, device: torch.device) -> Comparison:
    """All inverses of the set remade once, into the old ones' place."""
    stats = gram_statistics(parameter_set, device)
    expected, info = reference.damped_inverse(in_float64(stats), DAMPING)
    _check_good(info)

    def candidate(name: str, invert: Callable[[Modes, float, Modes], object]) -> Candidate:
        out = empty_like(stats)
        return Candidate(name, lambda: invert(stats, DAMPING, out), lambda: flat(out))

    return Comparison(
        [
            candidate(OURS, damped_inverse),
            candidate("linalg.inv", device_baselines.inverse_linalg),
            candidate("cholesky_inverse", device_baselines.inverse_cholesky),
        ],
        flat(expected),
        inverse_work(parameter_set.views, parameter_set.diagonal),
        dict.fromkeys(("linalg.inv", "cholesky_inverse"), READS_ON_THE_HOST),
    )


def root(parameter_set: ParameterSet, device: torch.device) -> Comparison:
    """All roots of the set, 1 / 2k for k modes as in Shampoo, remade once."""
    stats = gram_statistics(parameter_set, device)
    roots = [2 * len(view) for view in parameter_set.views]
    expected, info = reference.inverse_root(in_float64(stats), DAMPING, roots)
    _check_good(info)

    def candidate(name: str, make: Callable[[Modes, float, list[int], Modes], object]) -> Candidate:
        out = empty_like(stats)
        return Candidate(name, lambda: make(stats, DAMPING, roots, out), lambda: flat(out))

    refused = dict.fromkeys(("linalg.eigh", "coupled Newton in torch"), READS_ON_THE_HOST)
    if backends().ops["inverse_root"][device.type] == "reference":
        refused[OURS] = READS_ON_THE_HOST
    # The work depends on how soon the iteration ends: only the bytes are known beforehand.
    reads = inverse_work(parameter_set.views, parameter_set.diagonal)
    return Comparison(
        [
            candidate(OURS, inverse_root),
            candidate("linalg.eigh", baselines.root_eigh),
            candidate("coupled Newton in torch", reference.inverse_root),
        ],
        flat(expected),
        Work(bytes=reads.bytes),
        refused,
        "its flops depend on the matrices and are not counted",
    )


def _check_good(info: Tensor) -> None:
    if bool(info.any()):
        raise ValueError(f"the reference itself failed: info is {info.tolist()}")


COMPARISONS: dict[str, Make] = {
    "gram_ema_": gram,
    "preconditioned_step_": step,
    "damped_inverse": inverse,
    "mode_products": products,
    "inverse_root": root,
}
