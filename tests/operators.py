"""Calls of the operators: random arguments, what a call writes and returns, how close it is.

A variant is an operator with the options that change what it computes. The contract tests, the
tests of bad input, of threads and of graphs all draw their arguments here.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import (
    STATE_DTYPES,
    buffer_of,
    close,
    flat,
    identical,
    mode_statistics,
    normal,
    poisoned_like,
    scalar,
    state_dtype,
)
from tolerances import FLOAT32_OPERATOR, FLOAT64_OPERATOR, NEWTON_OPERATOR
from torch import Tensor

import tnt_kernels

VARIANTS = (
    "gram_ema_",
    "gram_ema_ whitened",
    "damped_inverse",
    "damped_inverse relative",
    "inverse_root",
    "inverse_root relative",
    "mode_products",
    "preconditioned_step_",
    "scaled_step_",
    "grafted_directions_",
    "grafted_directions_ Nesterov",
    "grafted_directions_ Adam",
    "grafted_directions_ Adam Nesterov",
)
# The variants that read factors, and move momenta.
ROOTED = ("inverse_root", "inverse_root relative")
RELATIVE = ("damped_inverse relative", "inverse_root relative")
INVERSES = ("damped_inverse", "damped_inverse relative", *ROOTED)
GRAFTS = tuple(variant for variant in VARIANTS if variant.startswith("grafted"))
ADAM = tuple(variant for variant in GRAFTS if "Adam" in variant)
STEPS = ("preconditioned_step_", *GRAFTS)
GRAMS = ("gram_ema_", "gram_ema_ whitened")

# The arguments that a call writes; the first group may have any strides, `stats` and `out` not.
STRIDED_WRITTEN = ("params", "momenta", "second_moments")
WRITTEN = {
    "gram_ema_": ("stats",),
    "damped_inverse": ("out",),
    "inverse_root": ("out",),
    "mode_products": (),
    "preconditioned_step_": ("params", "momenta"),
    "scaled_step_": ("params",),
    "grafted_directions_": ("momenta", "second_moments", "out"),
}
# The arguments that are numbers or 0-dim tensors. A large lr makes the direction's error visible.
NUMBERS = {
    "gram_ema_": {"decay": 0.9},
    "damped_inverse": {"damping": 0.1},
    "inverse_root": {"damping": 0.1},
    "mode_products": {},
    "preconditioned_step_": {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.1},
    "scaled_step_": {"lr": 0.7, "weight_decay": 0.1},
    "grafted_directions_": {"momentum": 0.9},
}
# Tensors with numbers for each entry of the lists.
TABLES = ("counts", "scales")
# Results of float64 that are computed from the momenta: |R| and |P|.
NORMS = ("other_norms", "norms")
ROOTS = (4, 1, 2, 3, 6)

Results = dict[str, Any]


@dataclass
class Call:
    """One call of an operator: its name and its arguments by keyword."""

    name: str
    arguments: dict[str, Any]

    def __call__(self, functions: Any = tnt_kernels) -> Results:
        """Call it; return what it wrote and returned, each with an entry for every tensor."""
        returned = getattr(functions, self.name)(**self.arguments)
        a = self.arguments
        if self.name == "mode_products":
            return {"products": returned}
        if self.name in INVERSES:
            return {"factors": returned[0], "info": returned[1]}
        written = {key: a[key] for key in WRITTEN[self.name] if key != "out" and a.get(key)}
        if self.name == "grafted_directions_":
            norms = dict(zip(NORMS, returned[1].unbind(1), strict=True))
            return {**written, "directions": returned[0], **norms}
        assert returned is None
        return written

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Call":
        """The same call with every tensor replaced; ``change`` gets the argument's name too."""
        return Call(self.name, {key: _mapped(key, a, change) for key, a in self.arguments.items()})

    def copy(self, device: torch.device | str = "cpu") -> "Call":
        """The same call on copies of the tensors, with their strides and gaps."""
        return self.map(lambda key, tensor: copied(tensor, device))

    def double(self) -> "Call":
        """The same call on contiguous copies in float64."""
        return self.map(lambda key, tensor: tensor.detach().double().contiguous().clone())

    def with_arguments(self, **arguments: Any) -> "Call":
        return Call(self.name, {**self.arguments, **arguments})

    def only(self, t: int) -> "Call":
        """The call of tensor ``t`` alone, on the same tensors."""
        one = {
            key: a[t : t + 1] if isinstance(a, list) or key in TABLES and a is not None else a
            for key, a in self.arguments.items()
        }
        return Call(self.name, one)

    @property
    def lists(self) -> list[str]:
        """The arguments with an entry for every tensor."""
        own = ("root", "decayed")
        return [key for key, a in self.arguments.items() if isinstance(a, list) and key not in own]

    @property
    def written(self) -> list[Tensor]:
        return flat([self.arguments.get(key) for key in WRITTEN[self.name]])

    @property
    def read(self) -> list[Tensor]:
        return flat([a for key, a in self.arguments.items() if key not in WRITTEN[self.name]])


def _mapped(key: str, nested: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(nested, Tensor):
        return change(key, nested)
    if isinstance(nested, list):
        return [_mapped(key, entry, change) for entry in nested]
    return nested


def copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    """With the same strides, and with what lies in the gaps."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return tensor
    buffer = buffer_of(tensor.detach()).to(device, copy=True)
    copy = buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch._neg_view(copy) if tensor.is_neg() else copy


def call(
    variant: str,
    shapes: Sequence[Sequence[int]],
    kind: str | Sequence[Sequence[bool]] = "mixed",
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    grad_dtype: torch.dtype | Sequence[torch.dtype] | None = None,
) -> Call:
    """A call on random tensors. Several dtypes alternate; gradients have ``grad_dtype`` if given.

    ``kind`` is one of ``mode_statistics`` for all tensors, or says for each mode of each tensor
    whether it is diagonal. Momenta of ``grafted_directions_`` and the statistics of inverses have
    the dtype of the state that belongs to ``dtype``; gradients have ``dtype`` itself.
    """
    name, _, option = variant.partition(" ")
    dtypes = _each(dtype, len(shapes))
    states = [state_dtype(d) for d in dtypes]
    # Diagonal and full modes alternate from tensor to tensor too.
    kinds = [kind] * len(shapes) if isinstance(kind, str) else kind
    modes = [
        mode_statistics(s, k, state, t)
        for t, (s, k, state) in enumerate(zip(shapes, kinds, states, strict=True))
    ]

    def tensors(of: Sequence[torch.dtype]) -> list[Tensor]:
        return [normal(shape, d) for shape, d in zip(shapes, of, strict=True)]

    numbers = dict(NUMBERS[name])
    if name == "gram_ema_":
        whitening: dict[str, Any] = {}
        if option == "whitened":
            whitening["factors"] = [
                mode_statistics(s, k, state, t + 1)
                for t, (s, k, state) in enumerate(zip(shapes, kinds, states, strict=True))
            ]
        return Call(name, {"stats": modes, "tensors": tensors(dtypes), **numbers, **whitening})
    if name == "mode_products":
        return Call(name, {"tensors": tensors(dtypes), "factors": modes})
    if name in INVERSES:
        chosen: dict[str, Any] = {"relative": option == "relative"}
        if name == "inverse_root":
            chosen["root"] = [ROOTS[t % len(ROOTS)] for t in range(len(shapes))]
        out = [poisoned_like(row) for row in modes]
        return Call(name, {"stats": modes, **numbers, **chosen, "out": out})
    if name == "scaled_step_":
        chosen = {"decayed": [t % 3 != 0 for t in range(len(shapes))]}
        chosen["scales"] = torch.rand(len(shapes), dtype=torch.float64)
        directions = tensors(states)
        return Call(
            name, {"params": tensors(dtypes), "directions": directions, **numbers, **chosen}
        )
    grads = tensors(dtypes if grad_dtype is None else _each(grad_dtype, len(shapes)))
    moved = {"momenta": tensors(states), "grads": grads, "factors": modes, **numbers}
    if name == "preconditioned_step_":
        return Call(name, {"params": tensors(dtypes), **moved})
    moved["nesterov"] = "Nesterov" in option
    if "Adam" in option:
        counts = [[1.0 + t, 1.0 + (5 * t) % 7] for t in range(len(shapes))]
        moved["second_moments"] = [tensor.square() for tensor in tensors(states)]
        moved["counts"] = torch.tensor(counts, dtype=torch.float64).view(-1, 2)
    return Call(name, {**moved, "out": poisoned_like(moved["momenta"])})


def _each(dtype: torch.dtype | Sequence[torch.dtype], count: int) -> list[torch.dtype]:
    given = [dtype] if isinstance(dtype, torch.dtype) else dtype
    return list(itertools.islice(itertools.cycle(given), count))


def row(results: Results, t: int) -> list[Tensor]:
    """What a call gave for tensor ``t``."""
    return flat([given[t] for given in results.values()])


def everything(results: Results) -> list[Tensor]:
    return flat(list(results.values()))


def same(actual: Results, wanted: Results) -> None:
    """Equal to the bit, result by result."""
    for a, b in zip(everything(actual), everything(wanted), strict=True):
        identical(a.detach(), b.detach())


# How close a result must be.


def agree(actual: Results, wanted: Results, given: Call, tolerance: float | None = None) -> None:
    """Results of ``given`` are close to ``wanted``, which is in float64; matrices are symmetric."""
    assert actual.keys() == wanted.keys()
    for key, results in actual.items():
        for t, value in enumerate(wanted[key]):
            for result, expected in zip(flat([results[t]]), flat([value]), strict=True):
                assert result.dtype == dtype_of(key, t, given)
                _accurate(key, t, given, result.detach().cpu(), expected.cpu(), tolerance)


def dtype_of(key: str, t: int, given: Call) -> torch.dtype:
    """The dtype of the result ``key`` for tensor ``t``."""
    a = given.arguments
    if key == "params":
        return a["params"][t].dtype
    if key in ("info", *NORMS):
        return torch.int32 if key == "info" else torch.float64
    state: torch.dtype = flat([a.get("stats", a.get("factors", a.get("directions")))[t]])[0].dtype
    return state


def _accurate(
    key: str, t: int, given: Call, result: Tensor, expected: Tensor, tolerance: float | None
) -> None:
    if key == "info":
        return identical(result, expected.to(torch.int32))
    if result.dtype not in STATE_DTYPES:
        return rounded_once(result, expected, tolerance or FLOAT32_OPERATOR)
    if key in ("stats", "factors") and result.dim() == 2:
        identical(result, result.mT)
    if key in ("factors", "products", "directions"):
        assert result.is_contiguous()
    single = (given.arguments["momenta"][t] if key in NORMS else result).dtype != torch.float64
    usual = FLOAT32_OPERATOR if single else FLOAT64_OPERATOR
    if given.name == "inverse_root":
        if result.dim() == 1:  # no iteration
            usual = 4 * torch.finfo(result.dtype).eps
        elif not single:
            usual = NEWTON_OPERATOR
    close(result, expected, max(usual, tolerance or 0.0))


def rounded_once(actual: Tensor, exact: Tensor, tolerance: float = FLOAT32_OPERATOR) -> None:
    """Within half a spacing of the dtype, which a second rounding would exceed somewhere."""
    if exact.numel() == 0:
        return
    _, exponent = torch.frexp(exact)
    half_spacing = torch.finfo(actual.dtype).eps / 4 * 2.0 ** exponent.double()
    allowed = half_spacing + tolerance * exact.abs().max()
    assert ((actual.double() - exact).abs() <= allowed).all()


# The definition once more, by the independent oracle: dense, slow, in float64.


def by_oracle(given: Call) -> Results:
    """What the call must give, from tests/oracle.py and eigenvalues."""
    from oracle import contraction, mode_product, whitened_gram

    a = given.double().arguments
    if given.name == "gram_ema_":
        decay = a["decay"]
        grams = [[contraction(g, i) for i in range(g.dim())] for g in a["tensors"]]
        for t, row in enumerate(a.get("factors", [])):
            covariances = [torch.linalg.inv(_dense(factor)) for factor in row]
            g = a["tensors"][t]
            grams[t] = [whitened_gram(g, covariances, i) for i in range(g.dim())]
        return {
            "stats": [
                [decay * s + (1 - decay) * _kept(g, s) for s, g in zip(*rows, strict=True)]
                for rows in zip(a["stats"], grams, strict=True)
            ]
        }
    if given.name in INVERSES:
        factors = [_powers(given.name, a, t) for t in range(len(a["stats"]))]
        return {"factors": factors, "info": torch.zeros(len(factors))}

    def product(tensor: Tensor, t: int) -> Tensor:
        for i, factor in enumerate(a["factors"][t]):
            tensor = mode_product(tensor, _dense(factor), i)
        return tensor

    if given.name == "mode_products":
        return {"products": [product(tensor, t) for t, tensor in enumerate(a["tensors"])]}
    if given.name == "scaled_step_":
        numbers = zip(a["params"], a["directions"], a["scales"], a["decayed"], strict=True)
        lr, decay = a["lr"], a["weight_decay"]
        return {"params": [w - lr * (s * p + (decay if d else 0) * w) for w, p, s, d in numbers]}
    momenta = [a["momentum"] * m + g for m, g in zip(a["momenta"], a["grads"], strict=True)]
    ahead = momenta
    if a.get("nesterov"):
        ahead = [a["momentum"] * m + g for m, g in zip(momenta, a["grads"], strict=True)]
    directions = [product(n, t) for t, n in enumerate(ahead)]
    if given.name == "preconditioned_step_":
        lr, decay = a["lr"], a["weight_decay"]
        moved = zip(a["params"], directions, strict=True)
        return {"params": [w - lr * (p + decay * w) for w, p in moved], "momenta": momenta}
    results: Results = {"momenta": momenta}
    others = ahead
    if a.get("counts") is not None:
        beta, eps, mu = a.get("second_decay", 0.99), a.get("eps", 1e-8), a["momentum"]
        more = int(a["nesterov"])  # one more power of mu in the sum
        moments = zip(a["second_moments"], a["grads"], strict=True)
        results["second_moments"] = [beta * v + (1 - beta) * g * g for v, g in moments]
        others = [
            # An average of gradients, as Adam's is: the momentum is their sum.
            (1 - mu) * n / (1 - mu ** (t + more)) / ((v / (1 - beta**k)).sqrt() + eps)
            for n, v, (t, k) in zip(
                ahead, results["second_moments"], a["counts"].tolist(), strict=True
            )
        ]
    norms = [
        torch.tensor([math.sqrt(float(p.square().sum())) for p in steps], dtype=torch.float64)
        for steps in (others, directions)
    ]
    return {**results, "directions": directions, **dict(zip(NORMS, norms, strict=True))}


def _powers(name: str, a: dict[str, Any], t: int) -> list[Tensor]:
    from oracle import covariances

    stats, damping = a["stats"][t], a["damping"]
    matrices = [_dense(s) for s in stats]
    power = -1 / a["root"][t] if name == "inverse_root" else -1.0
    if name == "damped_inverse":
        matrices, c = covariances(matrices)
        damping = damping * c if a["relative"] else damping
    results = []
    for matrix, stat in zip(matrices, stats, strict=True):
        if name == "inverse_root" and a["relative"]:
            damping = a["damping"] * matrix.trace() / len(matrix)
        values, vectors = torch.linalg.eigh(matrix + damping * torch.eye(len(matrix)).double())
        results.append(_kept(vectors @ torch.diag(values**power) @ vectors.mT, stat))
    return results


def _dense(stat: Tensor) -> Tensor:
    return torch.diag(stat) if stat.dim() == 1 else stat


def _kept(matrix: Tensor, stat: Tensor) -> Tensor:
    return matrix.diagonal() if stat.dim() == 1 else matrix


# The flat form.


def flat_arguments(given: Call) -> tuple[Any, ...]:
    """What torch.ops.tnt_kernels takes for the same call."""
    a = given.arguments

    def numbers() -> Iterator[Tensor]:
        for key in NUMBERS[given.name]:
            yield a[key] if isinstance(a[key], Tensor) else scalar(a[key])

    if given.name == "gram_ema_":
        return flat(a["stats"]), a["tensors"], *numbers(), flat(a.get("factors", []))
    if given.name in INVERSES:
        roots = [a["root"]] if given.name == "inverse_root" else []
        lists = flat(a["out"]), flat(a["stats"]), [len(r) for r in a["stats"]]
        return *lists, *numbers(), *roots, a["relative"]
    if given.name == "mode_products":
        return a["tensors"], flat(a["factors"])
    if given.name == "scaled_step_":
        return a["params"], a["directions"], *numbers(), a["decayed"], a["scales"]
    if given.name == "preconditioned_step_":
        return a["params"], a["momenta"], a["grads"], flat(a["factors"]), *numbers()
    squares, counts = a.get("second_moments") or [], a.get("counts")
    counts = torch.zeros(0, 2, dtype=torch.float64) if counts is None else counts
    lists = a["momenta"], squares, a["out"], a["grads"], flat(a["factors"])
    options = a.get("second_decay", 0.99), a.get("eps", 1e-8), a["nesterov"]
    return *lists, *numbers(), counts, *options
