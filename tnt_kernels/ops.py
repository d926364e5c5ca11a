"""The public operators: what each does, what it takes, and one call.

All of them work on lists, because a model has a hundred small parameters and one call must serve
them all. Conventions shared by every function here:

- ``tensors[t]`` is a tensor G of shape (d_1, ..., d_k), k >= 1, with any strides and of dtype
  float32, float64, bfloat16 or float16.
- ``stats[t][i]`` and ``factors[t][i]`` belong to mode i of tensor t: shape (d_i, d_i) and symmetric
  for a full mode, (d_i,) for a diagonal one; float64 where the tensor is float64, else float32;
  with any strides where they are read, contiguous where they are written.
- ``decay``, ``damping``, ``lr``, ``momentum`` and ``weight_decay`` are numbers or 0-dim tensors; a
  tensor may live on the lists' device, so that a captured graph can change it.
- All tensors of one call are on one device. No memory that is written may appear twice in a call;
  that is not checked. Empty lists are fine.
- A ``ValueError`` or ``TypeError`` names the argument at fault, and nothing has then been changed.
- Nothing here is differentiable.
"""

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tnt_kernels.schemas import NAMESPACE

Number = float | Tensor
Modes = Sequence[Sequence[Tensor]]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@torch.no_grad()
def gram_ema_(stats: Modes, tensors: Sequence[Tensor], decay: Number) -> None:
    """S_i <- decay S_i + (1 - decay) mat_i(G) mat_i(G)^T, for each tensor G and mode i.

    Args:
        stats: the moving averages S_i, updated in place, symmetric to the bit (of an S that was
            not, the lower triangle counts). A diagonal mode keeps only the diagonal.
        tensors: the tensors G.
        decay: in [0, 1]. At 0, S is overwritten without being read; at 1, S stays as it is and G
            is not looked at, whatever it holds. (A tensor's range is not checked.)

    Raises:
        ValueError: where a length, shape, dtype, device or number does not fit.
        TypeError: where an argument is not made of tensors.

    Source: Ren & Goldfarb 2021, Algorithm 2.

    >>> stats = [[torch.eye(2), torch.ones(3)]]  # a full and a diagonal mode
    >>> gram_ema_(stats, [torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])], decay=0.5)
    >>> stats[0]
    [tensor([[3., 0.],
            [0., 1.]]), tensor([1.0000, 1.0000, 2.5000])]
    """
    _check_tensors("tensors", tensors)
    _check_modes("stats", stats, "tensors", tensors, written=True)
    decay = _scalar("decay", decay, low=0.0, high=1.0)
    flat_stats = _flat(stats)
    _check_device(stats=flat_stats, tensors=tensors, decay=decay)
    _op("gram_ema_")(flat_stats, list(tensors), decay)


@torch.no_grad()
def damped_inverse(
    stats: Modes,
    damping: Number,
    out: Modes | None = None,
    relative: bool = False,
) -> tuple[list[list[Tensor]], Tensor]:
    """Rescales each tensor's statistics to equal average eigenvalues and inverts them, damped.

    With c = (tr S_1 / prod_j d_j)^(1/k) and U_i = S_i / (c^(k-1) prod_{j != i} d_j), so that every
    tr(U_i) / d_i is c: A_i = (U_i + damping I)^-1, elementwise for a diagonal mode. Where tr S_1 is
    0, U_i is 0.

    Args:
        stats: the S_i, positive semi-definite; the rescaling couples all modes of a tensor.
        damping: eps >= 0, in the units of U_i. (A tensor's range is not checked.)
        out: what to write to, like ``stats`` in shape and dtype; by default new tensors.
        relative: damp with eps c instead of eps; c = 0 then gives the identity.

    Returns:
        The factors A_i, symmetric to the bit (``out`` where given), and ``info``, int32 of shape
        (number of tensors,) on the device: 0, or i + 1 where mode i was the first that was not
        finite or not positive definite to working precision (a Cholesky pivot at most 16 roundings
        of its diagonal entry: its inverse would be noise). All factors of such a tensor keep what
        ``out`` held (NaN in new tensors).

    Raises:
        ValueError: where a length, shape, dtype, device or number does not fit.
        TypeError: where an argument is not made of tensors.

    Source: Ren & Goldfarb 2021, equation 13 and Algorithm 2.

    >>> stats = [[torch.diag(torch.tensor([12.0, 4.0])), torch.tensor([8.0, 8.0])]]
    >>> factors, info = damped_inverse(stats, damping=1.0)  # c = 2, U = diag(3, 1), diag(2, 2)
    >>> factors[0], info
    ([tensor([[0.2500, 0.0000],
            [0.0000, 0.5000]]), tensor([0.3333, 0.3333])], tensor([0], dtype=torch.int32))
    """
    out = _check_out(stats, out)
    damping = _scalar("damping", damping, low=0.0)
    flat_stats, flat_out = _flat(stats), _flat(out)
    _check_device(stats=flat_stats, out=flat_out, damping=damping)
    orders = [len(modes) for modes in stats]
    info = _op("damped_inverse")(flat_out, flat_stats, orders, damping, bool(relative))
    return [list(modes) for modes in out], info


@torch.no_grad()
def inverse_root(
    stats: Modes,
    damping: Number,
    root: int | Sequence[int],
    out: Modes | None = None,
) -> tuple[list[list[Tensor]], Tensor]:
    """A_i = (S_i + damping I)^(-1/root), by the coupled Newton iteration.

    Args:
        stats: the S_i, positive semi-definite.
        damping: eps >= 0, in the units of S_i. (A tensor's range is not checked.)
        root: a positive integer (Shampoo: 2k), or one for each tensor.
        out: what to write to, like ``stats`` in shape and dtype; by default new tensors.

    Returns:
        The factors and ``info``, as in ``damped_inverse``; a mode also fails where the iteration
        does not converge. Converging is not being accurate: in float32 the root's relative error
        grows with the condition number of S_i + damping I, which is what the damping is there to
        bound.

    Raises:
        ValueError: where a length, shape, dtype, device or number does not fit.
        TypeError: where an argument is not made of tensors.

    Source: Ren & Goldfarb 2021, Algorithm 4; Anil et al. 2021, "Scalable second order optimization
    for deep learning".
    """
    out = _check_out(stats, out)
    damping = _scalar("damping", damping, low=0.0)
    given = list(root) if isinstance(root, list | tuple) else [root]
    if any(not isinstance(p, int) or isinstance(p, bool) or p < 1 for p in given):
        raise ValueError(f"root must be a positive integer, or one for each tensor, got {root!r}")
    roots = given if isinstance(root, list | tuple) else given * len(stats)
    _check_length("root", roots, "stats", stats)
    flat_stats, flat_out = _flat(stats), _flat(out)
    _check_device(stats=flat_stats, out=flat_out, damping=damping)
    orders = [len(modes) for modes in stats]
    info = _op("inverse_root")(flat_out, flat_stats, orders, damping, roots)
    return [list(modes) for modes in out], info


@torch.no_grad()
def mode_products(tensors: Sequence[Tensor], factors: Modes) -> list[Tensor]:
    """G x_1 A_1 x_2 ... x_k A_k, for each tensor G: every mode multiplied by its factor.

    Args:
        tensors: the tensors G.
        factors: the symmetric A_i; a diagonal one scales its mode.

    Returns:
        New contiguous tensors of the shapes of ``tensors``, in the factors' dtype (float32 for
        half-precision tensors).

    Raises:
        ValueError: where a length, shape, dtype or device does not fit.
        TypeError: where an argument is not made of tensors.

    Source: Ren & Goldfarb 2021, equation 10 and Proposition 1.

    >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> mode_products([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], [[swap, torch.tensor([1.0, 10.0])]])
    [tensor([[ 3., 40.],
            [ 1., 20.]])]
    """
    _check_tensors("tensors", tensors)
    _check_modes("factors", factors, "tensors", tensors)
    flat_factors = _flat(factors)
    _check_device(tensors=tensors, factors=flat_factors)
    if not tensors:
        return []
    return list(_op("mode_products")(list(tensors), flat_factors))


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
        params: the W, any float dtype and strides, updated in place, rounded once.
        momenta: the m, updated in place; float64 where W is float64, else float32.
        grads: the g, any float dtype and strides.
        factors: the symmetric A_i, of the momenta's dtype.
        lr: alpha >= 0.
        momentum: mu >= 0.
        weight_decay: gamma >= 0, outside the preconditioner. (No tensor's range is checked.)

    Raises:
        ValueError: where a length, shape, dtype, device or number does not fit.
        TypeError: where an argument is not made of tensors.

    Source: Ren & Goldfarb 2021, Algorithm 2.
    """
    _check_tensors("params", params)
    _check_modes("factors", factors, "params", params)
    for name, others in (("momenta", momenta), ("grads", grads)):
        _check_tensors(name, others)
        _check_length(name, others, "params", params)
        for t, (other, param) in enumerate(zip(others, params, strict=True)):
            if other.shape != param.shape:
                raise ValueError(
                    f"{name}[{t}] must have the shape of params[{t}], {tuple(param.shape)}, "
                    f"got {tuple(other.shape)}"
                )
    for name, written in (("params", params), ("momenta", momenta)):
        for t, tensor in enumerate(written):
            if any(s == 0 and d > 1 for s, d in zip(tensor.stride(), tensor.shape, strict=True)):
                raise ValueError(
                    f"{name}[{t}] must have memory of its own for each element, got an expanded "
                    f"tensor with strides {tensor.stride()}"
                )
    for t, (m, param) in enumerate(zip(momenta, params, strict=True)):
        if m.dtype != _state_dtype(param):
            raise ValueError(
                f"momenta[{t}] must be {_state_dtype(param)} for a {param.dtype} parameter, "
                f"got {m.dtype}"
            )
    scalars = {
        name: _scalar(name, value, low=0.0)
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay))
    }
    flat_factors = _flat(factors)
    _check_device(params=params, momenta=momenta, grads=grads, factors=flat_factors, **scalars)
    _op("preconditioned_step_")(
        list(params), list(momenta), list(grads), flat_factors, *scalars.values()
    )


def _op(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name)


def _flat(modes: Modes) -> list[Tensor]:
    return [tensor for row in modes for tensor in row]


def _state_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scalar(name: str, value: Number, *, low: float, high: float = float("inf")) -> Tensor:
    if isinstance(value, Tensor):
        if value.dim() != 0 or not value.is_floating_point():
            raise ValueError(
                f"{name} must be a number or a 0-dim floating-point tensor, got "
                f"{tuple(value.shape)}, {value.dtype}"
            )
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, got {value!r}")
    if not low <= value <= high or value == float("inf"):
        bound = f"in [{low:g}, {high:g}]" if high < float("inf") else f"finite and >= {low:g}"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return torch.tensor(float(value), dtype=torch.float64)


def _check_length(name: str, got: Sequence[Any], other: str, want: Sequence[Any]) -> None:
    if not isinstance(got, list | tuple):
        raise TypeError(f"{name} must be a list, got {type(got).__name__}")
    if len(got) != len(want):
        raise ValueError(
            f"{name} must have one entry for each of {other} ({len(want)}), got {len(got)}"
        )


def _check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    for t, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}[{t}] must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _FLOATS or tensor.layout != torch.strided:
            raise ValueError(
                f"{name}[{t}] must be a dense float32, float64, bfloat16 or float16 tensor, "
                f"got {tensor.dtype}, {tensor.layout}"
            )
        if tensor.dim() == 0:
            raise ValueError(f"{name}[{t}] must have at least one mode; view a scalar as (1,)")


def _check_modes(
    name: str, modes: Modes, other: str, tensors: Sequence[Tensor], *, written: bool = False
) -> None:
    """Each modes[t][i] is (d_i, d_i) or (d_i,), of the state dtype of tensors[t]."""
    _check_length(name, modes, other, tensors)
    for t, (row, tensor) in enumerate(zip(modes, tensors, strict=True)):
        if not isinstance(row, list | tuple) or len(row) != tensor.dim():
            got = str(len(row)) if isinstance(row, list | tuple) else type(row).__name__
            raise ValueError(
                f"{name}[{t}] must have one tensor for each of the {tensor.dim()} modes of "
                f"{other}[{t}], got {got}"
            )
        dtype = _state_dtype(tensor)
        for i, (stat, d) in enumerate(zip(row, tensor.shape, strict=True)):
            if not isinstance(stat, Tensor):
                raise TypeError(f"{name}[{t}][{i}] must be a tensor, got {type(stat).__name__}")
            if stat.shape != (d, d) and stat.shape != (d,):
                raise ValueError(
                    f"{name}[{t}][{i}] must be ({d}, {d}) or ({d},), got {tuple(stat.shape)}"
                )
            if stat.dtype != dtype:
                raise ValueError(
                    f"{name}[{t}][{i}] must be {dtype} for a {tensor.dtype} tensor, "
                    f"got {stat.dtype}"
                )
            if written and not stat.is_contiguous():
                raise ValueError(f"{name}[{t}][{i}] must be contiguous, got {stat.stride()}")


def _check_out(stats: Modes, out: Modes | None) -> Modes:
    """Checks ``stats`` on its own, and ``out`` against it; makes ``out`` where there is none."""
    _check_length("stats", stats, "stats", stats)
    for t, row in enumerate(stats):
        if not isinstance(row, list | tuple) or not row:
            got = repr(row) if row is None or len(row) == 0 else type(row).__name__
            raise ValueError(f"stats[{t}] must be a list of one tensor for each mode, got {got}")
        _check_tensors(f"stats[{t}]", row)
        for i, stat in enumerate(row):
            if stat.dim() > 2 or stat.shape[0] != stat.shape[-1]:
                raise ValueError(f"stats[{t}][{i}] must be (d, d) or (d,), got {tuple(stat.shape)}")
            if stat.dtype != row[0].dtype or stat.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"stats[{t}][{i}] must be float32 or float64, one dtype for each tensor, "
                    f"got {stat.dtype}"
                )
    if out is None:
        return [[torch.full_like(s, float("nan")).contiguous() for s in row] for row in stats]
    _check_length("out", out, "stats", stats)
    for t, (kept, row) in enumerate(zip(out, stats, strict=True)):
        _check_length(f"out[{t}]", kept, f"stats[{t}]", row)
        _check_tensors(f"out[{t}]", kept)
        for i, (target, stat) in enumerate(zip(kept, row, strict=True)):
            if target is stat:
                raise ValueError(f"out[{t}][{i}] must not be stats[{t}][{i}] itself")
            if target.shape != stat.shape or target.dtype != stat.dtype:
                raise ValueError(
                    f"out[{t}][{i}] must be like stats[{t}][{i}], {tuple(stat.shape)} "
                    f"{stat.dtype}, got {tuple(target.shape)} {target.dtype}"
                )
            if not target.is_contiguous():
                raise ValueError(f"out[{t}][{i}] must be contiguous, got {target.stride()}")
    return out


def _check_device(**arguments: Tensor | Iterable[Tensor]) -> None:
    """All lists are on one device; a 0-dim tensor is there too, or on the CPU."""
    device = None
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            if argument.device.type != "cpu" and device is not None and argument.device != device:
                where = device if device.type == "cpu" else f"{device} or the CPU"
                raise ValueError(f"{name} must be on {where}, got {argument.device}")
            continue
        for tensor in argument:
            device = device or tensor.device
            if tensor.device != device:
                raise ValueError(
                    f"{name} must be on the device of the other arguments, {device}, "
                    f"got a tensor on {tensor.device}"
                )
