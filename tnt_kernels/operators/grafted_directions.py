"""``grafted_directions_``: preconditioned momenta, and the norms that grafting needs."""

from typing import Any

import torch
from torch import Tensor

from tnt_kernels import arguments
from tnt_kernels.arguments import Modes, Number, Tensors
from tnt_kernels.calls import all_on_cpu, by_mode, call, flat, listed
from tnt_kernels.formulas import moved, scalar_like, write
from tnt_kernels.operators.mode_products import definition as products

SCHEMA = (
    "grafted_directions_(Tensor(a!)[] momenta, Tensor(b!)[] second_moments, Tensor(c!)[] out, "
    "Tensor[] grads, Tensor[] factors, Tensor momentum, Tensor counts, float second_decay, "
    "float eps, bool nesterov) -> Tensor"
)


@torch.no_grad()
def grafted_directions_(
    momenta: Tensors,
    grads: Tensors,
    factors: Modes,
    momentum: Number,
    second_moments: Tensors | None = None,
    counts: Tensor | None = None,
    out: Tensors | None = None,
    *,
    second_decay: float = 0.99,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """m <- momentum m + g;  P = n x_1 A_1 ... x_k A_k;  the norms of P and of another step R.

    Grafting uses the length of R for P: the step is |R| / |P| P.

    n is m or, with ``nesterov``, the next step's m if its gradient were g again: momentum m + g. R
    is n or, with ``second_moments``, Adam's bias-corrected direction n^ / (sqrt(v^) + eps) with
    v <- second_decay v + (1 - second_decay) g^2. n^ and v^ are averages: the weights of their
    gradients sum to one.

    Args:
        momenta: the m, float32 or float64, updated in place.
        grads: the g, any float dtype and strides.
        factors: the symmetric A_i, of the momenta's dtype.
        momentum: mu >= 0; below 1 with ``second_moments``.
        second_moments: the v, like the momenta, updated in place.
        counts: the numbers of updates of each m and each v, this one included: (number of momenta,
            2), float64, on the CPU or the lists' device.
        out: where the P go, like the momenta and contiguous; by default new tensors.
        second_decay: in [0, 1).
        eps: >= 0.
        nesterov: whether P and R look ahead.

    Returns:
        The P, and the norms (|R|, |P|) of each: float64, (number of momenta, 2), on the device.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 2; Kingma & Ba 2015, Algorithm 1; Agarwal et al. 2020,
    "Disentangling adaptive gradient methods from learning rates"; Dozat 2016, "Incorporating
    Nesterov momentum into Adam".

    >>> m, g = torch.zeros(2), torch.tensor([3.0, 4.0])
    >>> (direction,), norms = grafted_directions_([m], [g], [[torch.tensor([2.0, 2.0])]], 0.9)
    >>> direction, norms
    (tensor([6., 8.]), tensor([[ 5., 10.]], dtype=torch.float64))
    """
    mu = arguments.scalar("momentum", momentum)
    _check_options(momentum, second_moments, counts, second_decay, eps)
    if not (torch.compiler.is_compiling() or all_on_cpu((momenta,))):
        _check_at_least_one(counts)  # they change at every step, so the cache of calls ignores them

    def check() -> None:
        arguments.check_tensors("momenta", momenta)
        arguments.check_shapes("grads", grads, "momenta", momenta)
        for t, m in enumerate(momenta):
            if m.dtype != arguments.state_dtype(m):
                raise ValueError(f"momenta[{t}] must be float32 or float64, got {m.dtype}")
            arguments.check_written(f"momenta[{t}]", m)
        for name, others in (("second_moments", second_moments), ("out", out)):
            if others is not None:
                arguments.check_like(name, others, "momenta", momenta, contiguous=name == "out")
        arguments.check_modes("factors", factors, "momenta", momenta)
        squares, into = second_moments or [], out or []
        read = {"grads": grads, "factors": factors}
        arguments.check_device(
            momenta=momenta, **read, second_moments=squares, out=into, momentum=mu
        )
        if counts is not None:
            arguments.check_table("counts", counts, (len(momenta), 2))
            _check_at_least_one(counts)
            arguments.check_device(momenta=momenta, counts=counts)
        written = {"momenta": momenta, "second_moments": squares, "out": into}
        arguments.check_overlaps(written, read)

    def flattened() -> tuple[Any, ...]:
        if second_moments is not None:  # to the operator, an empty list means not given
            arguments.check_length("second_moments", second_moments, "momenta", momenta)
        lists = map(listed, (momenta, second_moments or [], target, grads))
        table = torch.zeros(0, 2, dtype=torch.float64, device="cpu") if counts is None else counts
        return *lists, flat(factors, momenta), mu, table, second_decay, eps, nesterov

    target = _contiguous_like(momenta) if out is None else out
    norms = call(SCHEMA, check, flattened)
    return list(target), norms


def _check_options(
    momentum: Number, squares: Tensors | None, counts: Tensor | None, decay: float, eps: float
) -> None:
    """``second_moments`` and ``counts`` come together; Adam's bias corrections need numbers < 1."""
    if (squares is None) != (counts is None):
        given = "counts" if squares is None else "second_moments"
        raise ValueError(f"second_moments and counts must be given both or neither, got {given}")
    for name, number, high in (("second_decay", decay, 1.0), ("eps", eps, float("inf"))):
        if isinstance(number, Tensor):
            raise TypeError(f"{name} must be a number, got a tensor")
        arguments.scalar(name, number, high=high)
    below_one = {"second_decay": decay}
    if squares is not None and not isinstance(momentum, Tensor):
        below_one["momentum"] = momentum
    for name, value in below_one.items():
        if value >= 1:
            raise ValueError(f"{name} must be below 1 for Adam's bias corrections, got {value!r}")


def _check_at_least_one(counts: Tensor | None) -> None:
    """``counts`` on the CPU must be at least 1; on a device, a check would wait for it."""
    if torch.compiler.is_compiling() or not isinstance(counts, Tensor):
        return
    readable = counts.is_cpu and (counts.dtype, counts.layout) == (torch.float64, torch.strided)
    if readable and not bool((counts >= 1).all()):
        raise ValueError(f"counts must be at least 1, got {counts.min().item():g}")


def _contiguous_like(tensors: Tensors) -> list[Tensor]:
    try:
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    except (TypeError, RuntimeError):
        arguments.check_tensors("momenta", tensors)
        raise


def definition(
    momenta: Tensors,
    grads: Tensors,
    factors: Modes,
    momentum: Number,
    second_moments: Tensors | None = None,
    counts: Tensor | None = None,
    out: Tensors | None = None,
    *,
    second_decay: float = 0.99,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """m <- momentum m + g; P = n x_1 A_1 ... x_k A_k; the norms |R| and |P|, R is n or Adam's.

    n = m; with ``nesterov`` momentum m + g.
    """
    new_momenta = [moved(m, g, momentum) for m, g in zip(momenta, grads, strict=True)]
    ahead = new_momenta
    if nesterov:
        ahead = [moved(m, g, momentum) for m, g in zip(new_momenta, grads, strict=True)]
    directions = products(ahead, factors)
    others, new_moments = ahead, list[Tensor]()
    if second_moments is not None and counts is not None:
        new_moments = [
            second_decay * v + (1 - second_decay) * grad.to(v.dtype).square()
            for v, grad in zip(second_moments, grads, strict=True)
        ]
        powers = counts + torch.tensor([int(nesterov), 0], device=counts.device)
        others = [
            _adam(n, v, scalar_like(v, momentum), count, second_decay, eps)
            for n, v, count in zip(ahead, new_moments, powers, strict=True)
        ]
    pairs = zip(others, directions, strict=True)
    norms = [torch.stack([t.double().norm() for t in pair]) for pair in pairs]
    returned = torch.stack(norms) if norms else torch.zeros(0, 2, dtype=torch.float64)
    write([*momenta, *(second_moments or [])], [*new_momenta, *new_moments])
    if out is not None:
        write(out, directions)
    return directions if out is None else list(out), returned


def _adam(n: Tensor, v: Tensor, mu: Tensor, powers: Tensor, decay: float, eps: float) -> Tensor:
    """Adam's bias-corrected direction, from sums of these numbers of powers of mu and decay."""
    updates, second_updates = powers.to(v.device, v.dtype, non_blocking=True)
    # The momentum is not averaged: Adam's first moment is 1 - mu times it.
    first = (1 - mu) / (1 - mu**updates) * n
    direction: Tensor = first / ((v / (1 - decay**second_updates)).sqrt() + eps)
    return direction


def fake(momenta: Tensors, *others: Any) -> Tensor:
    """The shape of the norms; ``momentum`` has a device if there is no list."""
    like = momenta[0] if momenta else others[4]
    return like.new_empty(len(momenta), 2, dtype=torch.float64)


def from_flat(
    momenta: Tensors, squares: Tensors, out: Tensors, grads: Tensors, factors: Tensors, *rest: Any
) -> Tensor:
    """The definition on flat lists; without ``squares``, the second moments, it is not Adam's."""
    momentum, counts, second_decay, eps, nesterov = rest
    adam = (squares, counts) if squares else (None, None)
    lists = momenta, grads, by_mode(factors, momenta), momentum, *adam, out
    return definition(*lists, second_decay=second_decay, eps=eps, nesterov=nesterov)[1]
