"""The public operators: their contracts, and one call each.

All of them work on lists, because one call must handle the hundred small parameters of a model.
Conventions of every function here:

- ``tensors[t]`` is a tensor G of shape (d_1, ..., d_k), 1 <= k <= 64, with any strides and of dtype
  float32, float64, bfloat16 or float16.
- ``stats[t][i]`` and ``factors[t][i]`` belong to mode i of tensor t: shape (d_i, d_i) and symmetric
  for a full mode, (d_i,) for a diagonal one. They are float64 for float64 tensors, else float32.
  They may have any strides if they are only read, and are contiguous if they are written.
- ``decay``, ``damping``, ``lr``, ``momentum`` and ``weight_decay`` are numbers or 0-dim tensors; a
  tensor may be on the lists' device, so that a captured graph can change it. Their ranges are
  checked; that of a tensor by the C++ operators only, because a check may wait for a device. From
  PyTorch 2.15 on, what only C++ refuses is a ``RuntimeError``.
- All tensors of one call are on one device. Written memory must not appear twice in a call. Empty
  lists are allowed.
- A ``ValueError`` or ``TypeError`` names the argument that does not fit; the call then changes
  nothing.
- On the CPU, subnormal numbers may count as zero: arithmetic on them would be many times slower.
- Nothing here is differentiable.
"""

import math
import operator
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tnt_kernels.arguments import (
    Modes,
    Number,
    check_count_values,
    check_counts,
    check_device,
    check_directions,
    check_graft,
    check_length,
    check_modes,
    check_moments,
    check_out,
    check_overlaps,
    check_scales,
    check_statistics,
    check_step,
    check_tensors,
    has_memory,
    scalar,
)
from tnt_kernels.lists import addresses, layouts_key, mark_written
from tnt_kernels.schemas import NAMESPACE, SCHEMAS, in_extension


@torch.no_grad()
def gram_ema_(
    stats: Modes, tensors: Sequence[Tensor], decay: Number, factors: Modes | None = None
) -> None:
    """S_i <- decay S_i + (1 - decay) mat_i(G) mat_i(G)^T, for each tensor G and mode i.

    With ``factors`` A_j the other modes of each Gram matrix are whitened: it is s_i H_i with
    H_i = mat_i(G x_{j != i} A_j) mat_i(G)^T. s_i = |G|^2 / tr H_i (0 if tr H_i is not positive)
    gives it the trace that it has without. With A_j the inverse of the covariance of mode j, these
    are the alternating updates that maximise the likelihood of a tensor-normal distribution, up to
    the scale, which its factors share.

    Args:
        stats: the moving averages S_i, updated in place; the result is symmetric to the bit. Only
            their lower triangles are read. A diagonal mode keeps only the diagonal.
        tensors: the tensors G.
        decay: in [0, 1]. At 0, S is overwritten without being read; at 1, S does not change and G
            is not read, so it may hold NaN.
        factors: the symmetric positive definite A_j; by default identities.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 2. With factors: Dutilleul 1999, "The MLE algorithm for
    the matrix normal distribution"; in optimizers Lin et al. 2025, "Understanding and improving
    Shampoo and SOAP via Kullback-Leibler minimization".

    >>> stats = [[torch.eye(2), torch.ones(3)]]  # a full and a diagonal mode
    >>> gram_ema_(stats, [torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])], decay=0.5)
    >>> stats[0]
    [tensor([[3., 0.],
            [0., 1.]]), tensor([1.0000, 1.0000, 2.5000])]
    >>> stats = [[torch.zeros(2, 2), torch.zeros(2)]]
    >>> halves = [[torch.eye(2), torch.tensor([1.0, 0.5])]]
    >>> gram_ema_(stats, [torch.tensor([[1.0, 0.0], [0.0, 2.0]])], 0.0, halves)
    >>> stats[0]  # H_1 = diag(1, 2), of trace 3, and |G|^2 = 5
    [tensor([[1.6667, 0.0000],
            [0.0000, 3.3333]]), tensor([1., 4.])]
    """
    weight = scalar("decay", decay, high=1.0)

    def check() -> None:
        check_tensors("tensors", tensors)
        check_modes("stats", stats, "tensors", tensors, written=True)
        if factors is not None:
            check_modes("factors", factors, "tensors", tensors)
        flat, flat_factors = _flat(stats), _flat(factors or [])
        check_device(stats=flat, tensors=tensors, factors=flat_factors, decay=weight)
        check_overlaps({"stats": stats}, {"tensors": tensors, "factors": factors or []})

    def arguments() -> tuple[Any, ...]:
        whitening = [] if factors is None else _flat(factors, tensors)
        return _flat(stats, tensors), _listed(tensors), weight, whitening

    _call("gram_ema_", check, arguments)


@torch.no_grad()
def damped_inverse(
    stats: Modes, damping: Number, out: Modes | None = None, relative: bool = False
) -> tuple[list[list[Tensor]], Tensor]:
    """Rescales each tensor's statistics to equal average eigenvalues, damps and inverts them.

    With c = (tr S_1 / prod_j d_j)^(1/k) and U_i = S_i / (c^(k-1) prod_{j != i} d_j), so that every
    tr(U_i) / d_i is c: A_i = (U_i + damping I)^-1, elementwise for a diagonal mode. If tr S_1 / d_1
    is below tiny / eps of its dtype (1e-31 in float32), c and U_i count as 0.

    Args:
        stats: the S_i, positive semi-definite; the rescaling couples all modes of a tensor. Only
            their lower triangles are read.
        damping: eps >= 0, in the units of U_i.
        out: where the factors go, like ``stats`` in shape and dtype; by default new tensors.
        relative: damp with eps c instead of eps; c = 0 then gives the identity.

    Returns:
        The factors A_i, symmetric to the bit, and ``info``, int32 of shape (number of tensors,) on
        the device: 0, or i + 1 if mode i is the first that is not finite or not positive definite
        to working precision. A Cholesky pivot of at most 16 roundings of its diagonal entry fails,
        because its inverse would be noise. All factors of a failed tensor keep the values of
        ``out`` (NaN in new tensors).

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, equation 13 and Algorithm 2.

    >>> stats = [[torch.diag(torch.tensor([12.0, 4.0])), torch.tensor([8.0, 8.0])]]
    >>> factors, info = damped_inverse(stats, damping=1.0)  # c = 2, U = diag(3, 1), diag(2, 2)
    >>> factors[0], info
    ([tensor([[0.2500, 0.0000],
            [0.0000, 0.5000]]), tensor([0.3333, 0.3333])], tensor([0], dtype=torch.int32))
    """
    eps = scalar("damping", damping)

    def arguments() -> tuple[Any, ...]:
        return _flat(target), _flat(stats), [len(row) for row in stats], eps, bool(relative)

    target = _like(stats) if out is None else out
    info = _call("damped_inverse", lambda: _check_factors(stats, out, eps), arguments)
    return [list(row) for row in target], info


@torch.no_grad()
def inverse_root(
    stats: Modes,
    damping: Number,
    root: int | Sequence[int],
    out: Modes | None = None,
    relative: bool = False,
) -> tuple[list[list[Tensor]], Tensor]:
    """A_i = (S_i + damping I)^(-1/root): by eigenvalues in C++, else by Newton's iteration.

    Args:
        stats: the S_i, positive semi-definite; of a matrix only the lower triangle is read.
        damping: eps >= 0, in the units of S_i.
        root: a positive integer (Shampoo: 2k), or one for each tensor.
        out: where the factors go, like ``stats`` in shape and dtype; by default new tensors.
        relative: damp each S_i with eps times its own average eigenvalue, tr S_i / d_i, instead of
            eps. If the average is below tiny / eps of its dtype (1e-31 in float32), S_i is damped
            with 1: the root is the identity.

    Returns:
        The factors and ``info``, as in ``damped_inverse``. A mode fails if an entry is not finite
        or if S_i + damping I is not positive definite to working precision. By eigenvalues: those
        between -sqrt(d) eps / 2 times the largest and 0 count as 0, because that is rounding;
        damped, each must exceed float64's roundings of the largest. Relative damping is added
        before, in the dtype of S_i. The coupled Newton iteration fails where it does not converge.
        In float32 the root's relative error grows with the condition number, which the damping
        bounds: see docs/operators.md.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 4; Anil et al. 2021, "Scalable second order optimization
    for deep learning".

    >>> stats = [[torch.diag(torch.tensor([7.0, 1.0])), torch.tensor([2.0, 0.0])]]
    >>> factors, info = inverse_root(stats, 0.5, root=2, relative=True)  # damped with 2.0 and 0.5
    >>> factors[0][1], info
    (tensor([0.6325, 1.4142]), tensor([0], dtype=torch.int32))
    """
    eps = scalar("damping", damping)
    given: list[Any] = list(root) if isinstance(root, list | tuple) else [root]
    if any(not isinstance(p, Integral) or isinstance(p, bool) or p < 1 for p in given):
        raise ValueError(f"root must be a positive integer, or one for each tensor, got {root!r}")

    def arguments() -> tuple[Any, ...]:
        roots = list(map(int, given)) * (1 if isinstance(root, list | tuple) else len(stats))
        orders = [len(row) for row in stats]
        return _flat(target), _flat(stats), orders, eps, roots, bool(relative)

    def check() -> None:
        _check_factors(stats, out, eps)
        if isinstance(root, list | tuple):
            check_length("root", given, "stats", stats)

    target = _like(stats) if out is None else out
    info = _call("inverse_root", check, arguments)
    return [list(row) for row in target], info


@torch.no_grad()
def mode_products(tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    """G x_1 A_1 x_2 ... x_k A_k, for each tensor G: multiplies every mode by its factor.

    Args:
        tensors: the tensors G.
        factors: the symmetric A_i; a diagonal one scales its mode.

    Returns:
        New contiguous tensors of the shapes of ``tensors``, in the factors' dtype (float32 for
        half-precision tensors).

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, equation 10 and Proposition 1.

    >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> mode_products([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], [[swap, torch.tensor([1.0, 10.0])]])
    [tensor([[ 3., 40.],
            [ 1., 20.]])]
    """

    def check() -> None:
        check_tensors("tensors", tensors)
        check_modes("factors", factors, "tensors", tensors)
        check_device(tensors=tensors, factors=_flat(factors))

    if isinstance(tensors, list | tuple) and not tensors:
        check()
        return []
    return list(_call("mode_products", check, lambda: (_listed(tensors), _flat(factors, tensors))))


@torch.no_grad()
def preconditioned_step_(
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
) -> None:
    """m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W).

    Args:
        params: the W, any float dtype and strides, updated in place; half precision is rounded
            once, at the end.
        momenta: the m, updated in place; float64 for a float64 W, else float32.
        grads: the g, any float dtype and strides.
        factors: the symmetric A_i, of the momenta's dtype.
        lr: alpha >= 0.
        momentum: mu >= 0.
        weight_decay: gamma >= 0, outside the preconditioner.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    Source: Ren & Goldfarb 2021, Algorithm 2.
    """
    scalars = {
        name: scalar(name, value)
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay))
    }

    def check() -> None:
        check_tensors("params", params)
        check_modes("factors", factors, "params", params)
        check_step(params, momenta, grads)
        flat = _flat(factors)
        check_device(params=params, momenta=momenta, grads=grads, factors=flat, **scalars)
        check_overlaps({"params": params, "momenta": momenta}, {"grads": grads, "factors": factors})

    def arguments() -> tuple[Any, ...]:
        lists = map(_listed, (params, momenta, grads))
        return *lists, _flat(factors, params), *scalars.values()

    _call("preconditioned_step_", check, arguments)


@torch.no_grad()
def scaled_step_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    lr: Number,
    weight_decay: Number,
    decayed: Sequence[bool] | None = None,
    scales: Tensor | None = None,
) -> None:
    """W <- W - lr (s P + weight_decay W), for each W, its direction P and its scale s.

    Args:
        params: the W, any float dtype and strides, updated in place; half precision is rounded
            once.
        directions: the P, of any strides; float64 for a float64 W, else float32.
        lr: alpha >= 0.
        weight_decay: gamma >= 0.
        decayed: for each W, whether it decays; by default all do.
        scales: the s, float64 of shape (number of params,), on the CPU or the lists' device; by
            default 1.

    Raises:
        ValueError, TypeError: naming the argument that does not fit; nothing is then changed.

    >>> w, p = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> scaled_step_([w], [p], 0.1, 0.0, scales=torch.tensor([2.0], dtype=torch.float64))
    >>> w
    tensor([0.4000, 1.2000])
    """
    alpha = scalar("lr", lr)
    gamma = scalar("weight_decay", weight_decay)

    def check() -> None:
        check_tensors("params", params)
        check_directions(params, directions)
        if decayed is not None:
            check_length("decayed", decayed, "params", params)
        check_device(params=params, directions=directions, lr=alpha, weight_decay=gamma)
        if scales is not None:
            check_scales(scales, params)
            check_device(params=params, scales=scales)
        check_overlaps({"params": params}, {"directions": directions})

    def arguments() -> tuple[Any, ...]:
        if scales is not None:  # to the operator, an empty table means not given
            check_scales(scales, params)
        table = torch.zeros(0, dtype=torch.float64, device="cpu") if scales is None else scales
        chosen = [True] * len(params) if decayed is None else decayed
        return _listed(params), _listed(directions), alpha, gamma, chosen, table

    _call("scaled_step_", check, arguments)


@torch.no_grad()
def grafted_directions_(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    factors: Modes,
    momentum: Number,
    second_moments: Sequence[Tensor] | None = None,
    counts: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
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
    mu = scalar("momentum", momentum)
    check_graft(momentum, second_moments, counts, second_decay, eps)
    if not (torch.compiler.is_compiling() or _all_on_cpu((momenta,))):
        check_count_values(counts)  # they change at every step, so the cache of calls ignores them

    def check() -> None:
        check_moments(momenta, grads, second_moments, out)
        check_modes("factors", factors, "momenta", momenta)
        flat, squares, into = _flat(factors), second_moments or [], out or []
        lists = {"momenta": momenta, "grads": grads, "factors": flat}
        check_device(**lists, second_moments=squares, out=into, momentum=mu)
        if counts is not None:
            check_counts(counts, momenta)
            check_device(momenta=momenta, counts=counts)
        check_overlaps(
            {"momenta": momenta, "second_moments": squares, "out": into},
            {"grads": grads, "factors": factors},
        )

    def arguments() -> tuple[Any, ...]:
        if second_moments is not None:  # to the operator, an empty list means not given
            check_length("second_moments", second_moments, "momenta", momenta)
        lists = map(_listed, (momenta, second_moments or [], target, grads))
        table = torch.zeros(0, 2, dtype=torch.float64, device="cpu") if counts is None else counts
        return *lists, _flat(factors, momenta), mu, table, second_decay, eps, nesterov

    target = _contiguous_like(momenta) if out is None else out
    norms = _call("grafted_directions_", check, arguments)
    return list(target), norms


def _call(name: str, check: Callable[[], None], arguments: Callable[[], tuple[Any, ...]]) -> Any:
    """Calls the operator on checked arguments.

    The C++ operators check before they write; ``check`` then runs only after a refusal, to name the
    argument in terms of nested lists. (Checking resnet32's 158 modes in Python takes half as long
    as their Gram matrices.)
    """
    if torch.compiler.is_compiling() or not in_extension(name):
        check()
        return _op(name)(*arguments())
    try:
        flat = arguments()
        on_cpu = _all_on_cpu(flat)
        if not on_cpu:  # another backend may run, which checks nothing
            _check_once(name, flat, check)
        result = _op(name)(*flat)
        if on_cpu:  # the written lists come first; PyTorch's stable C++ interface cannot mark them
            for written in flat[: SCHEMAS[name].count("!")]:
                mark_written(written)
        return result
    except Exception:
        check()
        raise


def _check_once(name: str, flat: Sequence[Any], check: Callable[[], None]) -> None:
    """Checks a call, unless one with the same key has passed.

    A training step repeats its calls, and a key takes much less time than the checks.
    """
    call = _recognised(name, flat)
    if call is not None and call in _checked:
        return
    check()
    if call is not None:
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked.add(call)


# Keys of calls that have passed; bounded, because gradients may get new addresses at every step.
_checked: set[tuple[Any, ...]] = set()
_MOST_CHECKED = 256


def _recognised(name: str, flat: Sequence[Any]) -> tuple[Any, ...] | None:
    """The key of a call on GPU tensors: all that its checks depend on. None for other calls."""
    call: list[Any] = [name]
    for argument in flat:
        if isinstance(argument, Tensor):
            call.append((argument.shape, argument.dtype, argument.device))
        elif not isinstance(argument, list) or not argument or isinstance(argument[0], int):
            call.append(str(argument))
        elif isinstance(argument[0], Tensor) and argument[0].is_cuda and has_memory(argument[0]):
            try:
                call += addresses(argument), layouts_key(argument, 1)
            except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without memory
                return None
        else:
            return None
    return tuple(call)


def _op(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_is_cpu = operator.attrgetter("is_cpu")


def _all_on_cpu(arguments: Sequence[Any]) -> bool:
    """Whether the C++ operators run, which check: all tensors have memory, on the CPU."""
    lists = [a if isinstance(a, list | tuple) else [a] for a in arguments]
    try:
        lists = [a for a in lists if a and isinstance(a[0], Tensor)]
        return all(has_memory(a[0]) and all(map(_is_cpu, a)) for a in lists)
    except AttributeError:  # not a tensor, which the operator refuses
        return True


def _listed(tensors: Sequence[Any]) -> list[Any]:
    """A list's entries. A tensor has entries too, its rows, but is no list of tensors."""
    if isinstance(tensors, Tensor):
        raise TypeError("must be a list, got a tensor")
    return list(tensors)


def _flat(modes: Modes, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The modes of all tensors in one list; refuses another number than ``tensors`` have."""
    if tensors is not None and [len(row) for row in modes] != [t.dim() for t in tensors]:
        raise ValueError("there must be one entry for each mode of each tensor")
    return [tensor for row in _listed(modes) for tensor in _listed(row)]


def _contiguous_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    try:
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    except (TypeError, RuntimeError):
        check_tensors("momenta", tensors)
        raise


def _like(stats: Modes) -> list[list[Tensor]]:
    """New tensors for factors, filled with NaN."""
    try:
        dense = torch.contiguous_format
        return [[torch.full_like(s, math.nan, memory_format=dense) for s in row] for row in stats]
    except (TypeError, RuntimeError):
        check_statistics(stats)
        raise


def _check_factors(stats: Modes, out: Modes | None, damping: Tensor) -> None:
    check_statistics(stats)
    if out is not None:
        check_out(out, stats)
    flat_stats, flat_out = _flat(stats), _flat(out or [])
    check_device(stats=flat_stats, out=flat_out, damping=damping)
    check_overlaps({"out": out or []}, {"stats": stats})
