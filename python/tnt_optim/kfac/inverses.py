r"""KFAC's inverse factors: their two forms, their owner ranks, and the update that applies them.

Both forms stand for an inverse that acts on a layer's matrix [W | b], and are made of its
statistics [G, A]. "damped" is the inverse of (G + √damping I) ⊗ (A + √damping I), Martens & Grosse
2015, section 6.3, without their factor π between the two. "eigenbasis" is the inverse of
G ⊗ A + damping I, by the eigenvectors of G and A. Ren & Goldfarb 2021 use the first for
autoencoders and the second for CNNs. Relative damping is in units of the average eigenvalue of
G ⊗ A. √damping is then in units of each factor's average eigenvalue, which gives their factor π. A
new form is one more entry of ``INVERSES``.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tnt_kernels import damped_inverse, mode_products, scaled_step_
from tnt_optim.attempt import Stage
from tnt_optim.autograd import without_autocast
from tnt_optim.directions import LARGEST, RMS
from tnt_optim.distributed.ownership import Load, assign
from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.distributed.replicated import Replicated
from tnt_optim.kfac.layers import Layer, joined, parameters, split
from tnt_optim.kfac.statistics import States
from tnt_optim.modes import by_device, state_dtype
from tnt_optim.options import as_number

SHARDS = (None, "inverses")

# The matrices that codes 1 and 2 stand for.
PARTS = ("gradient factor G", "input factor A")

# Without damping, an eigenvalue of at most this many eps of the largest counts as zero, like a
# pivot in ``damped_inverse``. With damping none does: a layer of 4609 inputs has true eigenvalues
# below n eps of the largest.
SINGULAR_ROUNDINGS = 16

# Of Adam's second moment, as in ``grafted_directions_``.
SECOND_DECAY = 0.99

Matrices = list[list[Tensor]]
Number = float | Tensor


@dataclass(frozen=True)
class Inverse:
    """One form of the inverse."""

    # From (out, in) to the shapes of a layer's factors.
    shapes: Callable[[int, int], list[tuple[int, int]]]
    # (stats, damping, relative, out) to codes; writes the factors into ``out``. A layer's code is
    # 0, or 1 if its G and 2 if its A could not be inverted; its entry of ``out`` stays as it was.
    make: Callable[[Matrices, Number, bool, Matrices], Tensor]
    # (matrices, factors) to the directions, for each layer.
    apply: Callable[[Sequence[Tensor], Matrices], list[Tensor]]

    def allocated(self, g: Tensor, a: Tensor) -> list[Tensor]:
        """Tensors for the factors of a layer's statistics, with any values."""
        return [g.new_empty(shape) for shape in self.shapes(len(g), len(a))]


def _damped(stats: Matrices, damping: Number, relative: bool, out: Matrices) -> Tensor:
    """[(G + √damping I)^-1, (A + √damping I)^-1]."""
    root = damping.sqrt() if isinstance(damping, Tensor) else math.sqrt(damping)
    # As tensors with one mode each, for which equation 13 rescales the damping by c^0 = 1.
    single, target = ([[matrix] for pair in rows for matrix in pair] for rows in (stats, out))
    _, info = damped_inverse(single, root, target, relative)
    failed_g, failed_a = (info.view(-1, 2) != 0).unbind(1)
    return torch.where(failed_g, 1, 2 * failed_a.to(torch.int32)).to(torch.int32)


def _eigenbasis(stats: Matrices, damping: Number, relative: bool, out: Matrices) -> Tensor:
    """[Q_G, Q_A, 1 / (λ_G λ_Aᵀ + damping)]. Waits for the device, as ``eigh`` does."""
    codes = []
    for pair, factors in zip(stats, out, strict=True):
        (values_g, vectors_g), (values_a, vectors_a) = map(_spectrum, pair)
        products = torch.outer(values_g.clamp(min=0), values_a.clamp(min=0))
        unit = products.mean() if relative else torch.ones_like(products[0, 0])
        # Like ``damped_inverse``: the identity if the statistics are zero, or nearly.
        limits = torch.finfo(unit.dtype)
        nothing = unit < limits.tiny / limits.eps
        scale = torch.where(nothing, 1.0, (products + damping * unit).reciprocal())
        singular_g, singular_a = _is_singular(values_g), _is_singular(values_a)
        good = scale.isfinite().all() & ((damping > 0) | ~(singular_g | singular_a))
        finite_g, finite_a = values_g.isfinite().all(), values_a.isfinite().all()
        failed = torch.where(~finite_g | (finite_a & singular_g), 1, 2)
        codes.append(torch.where(good, 0, failed).to(torch.int32))
        for old, new in zip(factors, (vectors_g, vectors_a, scale), strict=True):
            old.copy_(torch.where(good, new, old))
    return torch.stack(codes)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors; NaN if the iteration does not converge.

    In float32 it often fails on a matrix with many zero rows: that of 3 x 3 patches of 1 x 1 maps.
    """
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        return values.to(matrix.dtype), vectors.to(matrix.dtype)
    return matrix.new_full((len(matrix),), math.nan), torch.full_like(matrix, math.nan)


def _is_singular(values: Tensor) -> Tensor:
    """Whether the smallest of ascending eigenvalues is zero to working precision."""
    eps = torch.finfo(values.dtype).eps
    return values[0] <= SINGULAR_ROUNDINGS * eps * values[-1].clamp(min=0)


def _rotated(matrices: Sequence[Tensor], factors: Matrices) -> list[Tensor]:
    """Q_G ((Q_Gᵀ M Q_A) ∘ scale) Q_Aᵀ; ``mode_products`` takes symmetric factors only."""
    with without_autocast(matrices[0]):
        return [
            q_g @ ((q_g.T @ matrix @ q_a) * scale) @ q_a.T
            for matrix, (q_g, q_a, scale) in zip(matrices, factors, strict=True)
        ]


INVERSES = {
    "damped": Inverse(lambda m, n: [(m, m), (n, n)], _damped, mode_products),
    "eigenbasis": Inverse(lambda m, n: [(m, m), (n, n), (m, n)], _eigenbasis, _rotated),
}


def owner_ranks(stats: Mapping[Tensor, Sequence[Tensor]], processes: int) -> dict[Tensor, int]:
    """The rank that computes each layer's factors, by weight, so that all do about equal work."""
    loads = [Load(float(sum(len(matrix) ** 3 for matrix in pair))) for pair in stats.values()]
    return dict(zip(stats, assign(loads, [Load()] * processes), strict=True))


def made_by_owners(
    processes: ProcessGroup,
    inverse: Inverse,
    states: States,
    damping: Number,
    relative: bool,
) -> Tensor:
    """As ``inverse.make``, with each layer's factors computed by one rank for all.

    ``states``, by weight and on one device: the statistics are equal in all processes, so the
    factors become equal.
    """
    stats = {weight: state["stats"] for weight, state in states.items()}
    sharing = Replicated(processes, "inverses", owner_ranks(stats, processes.size).__getitem__)
    own = sharing.owned(stats)
    codes = next(iter(stats.values()))[0].new_zeros(0)
    if own:
        target = [states[weight]["factors"] for weight in own]
        codes = inverse.make([stats[w] for w in own], damping, relative, target)
    codes = sharing.codes(list(stats), own, codes)
    sharing.send_factors(stats, states)
    return codes


def update(
    groups: Sequence[Mapping[str, Any]],
    states: States,
    layers: Sequence[Layer],
    others: Sequence[Tensor],
    inverse: Inverse,
) -> list[Stage]:
    """The stages of m <- μ m + g; W <- W - lr (s P + γ W).

    P is the preconditioned m in layers, m elsewhere. With ``graft`` s brings P to the norm of the
    other method's direction. Updates the parameters of ``layers`` that have gradients, and the
    ``others``. Momenta and second moments that are missing in ``states`` start at zero. Reads no
    value on the host.
    """
    wanted = {*others, *(param for layer in layers for param in parameters(layer))}
    batches = [
        (group, alike)
        for group in groups
        for alike in by_device(
            [p for p in group["params"] if p in wanted and p.grad is not None], by_dtype=True
        )
    ]
    held = ((p, p.grad) for _, params in batches for p in params)
    grads = {p: grad.to(state_dtype(p)) for p, grad in held if grad is not None}
    directions: dict[Tensor, Tensor] = {}
    by_weight = {layer.weight: layer for layer in layers}

    def precondition() -> None:
        found = {p: states[p]["momentum"] for p in grads}
        for weights in by_device(by_weight):
            blocks = [by_weight[weight] for weight in weights]
            matrices = [joined(block, found) for block in blocks]
            applied = inverse.apply(matrices, [states[weight]["factors"] for weight in weights])
            for block, matrix in zip(blocks, applied, strict=True):
                pairs = zip(parameters(block), split(block, matrix), strict=True)
                found.update((param, part) for param, part in pairs if param in grads)
        directions.update(found)

    def move(group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        own = {p: directions[p] for p in params}
        moved, along = (list(map(torch.atleast_1d, t)) for t in (params, own.values()))
        decayed = [p.dim() > 1 or group["graft"] is None for p in params]
        rates = as_number(group["lr"]), group["weight_decay"]
        scaled_step_(moved, along, *rates, decayed, _graft_scales(group, states, own))

    stages: list[Stage] = []
    for group, params in batches:
        stages += _Moments(group, states, {p: grads[p] for p in params}).stages()
    return [*stages, precondition, *(functools.partial(move, *batch) for batch in batches)]


class _Moments:
    """The momenta of some parameters of one dtype, and their second moments if grafted to Adam."""

    def __init__(
        self, group: Mapping[str, Any], states: States, grads: Mapping[Tensor, Tensor]
    ) -> None:
        self.params, self.group = list(grads), group
        self.own, self.grads = [states[p] for p in grads], list(grads.values())
        self.adam = group["graft"] == "adam"
        # As tensors of the moments' dtype: in-place products then take no memory.
        self.decays = torch.tensor(
            [group["momentum"], SECOND_DECAY], dtype=self.grads[0].dtype, device="cpu"
        ).unbind()

    def stages(self) -> list[Stage]:
        """Missing moments; then one call for each change, none of which takes memory."""
        first = [self._make, self._decay, self._add]
        return [*first, self._decay_squares, self._add_squares] if self.adam else first

    def _each(self, name: str) -> list[Tensor]:
        return [state[name] for state in self.own]

    def _make(self) -> None:
        for state, param in zip(self.own, self.params, strict=True):
            add_moments(state, param, self.group)

    def _decay(self) -> None:
        torch._foreach_mul_(self._each("momentum"), self.decays[0])

    def _add(self) -> None:
        torch._foreach_add_(self._each("momentum"), self.grads)

    def _decay_squares(self) -> None:
        torch._foreach_mul_(self._each("second_moment"), self.decays[1])

    def _add_squares(self) -> None:
        squares = self._each("second_moment")
        torch._foreach_addcmul_(squares, self.grads, self.grads, 1 - SECOND_DECAY)
        for state in self.own:
            state["updates"] += 1


def add_moments(state: dict[str, Any], param: Tensor, group: Mapping[str, Any]) -> None:
    """Adds moments of zero to a state that has none."""
    if "momentum" not in state:
        zeros = torch.zeros(param.shape, dtype=state_dtype(param), device=param.device)
        adam = group["graft"] == "adam"
        more = {"second_moment": zeros.clone(), "updates": 0} if adam else {}
        state |= {"momentum": zeros, **more}  # together, or neither


def _graft_scales(
    group: Mapping[str, Any], states: States, directions: Mapping[Tensor, Tensor]
) -> Tensor | None:
    """|R| / |P| for each direction P, 0 if P is; R is as in ``grafted_directions_``."""
    if group["graft"] is None:
        return None
    others = [states[p]["momentum"] for p in directions]
    if group["graft"] == "adam":
        counts, mu = [states[p]["updates"] for p in directions], group["momentum"]
        roots = torch._foreach_sqrt([states[p]["second_moment"] for p in directions])
        roots = torch._foreach_div(roots, [math.sqrt(1 - SECOND_DECAY**count) for count in counts])
        torch._foreach_add_(roots, 1e-8)
        others = list(torch._foreach_div(others, roots))
        torch._foreach_mul_(others, [(1 - mu) / (1 - mu**count) for count in counts])
    lists = others, list(directions.values())
    norms, own = (torch._foreach_norm(tensors, 2, torch.float64) for tensors in lists)
    if group["graft"] == "rms":
        norms = tuple(
            torch.full_like(n, RMS * p.numel() ** 0.5) for n, p in zip(own, directions, strict=True)
        )
    lengths = torch.stack(own)
    scales = torch.where(lengths == 0, 0.0, torch.stack(norms) / lengths)
    return scales.clamp_max(LARGEST)
