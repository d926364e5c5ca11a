"""Notices at the first step that a likelihood does not fit the training loss.

A hook on the last output that the first step observes keeps a part of the training gradient by
that output. The step compares it with gradients that the likelihood's loss can have. Later steps do
nothing.
"""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tnt_optim.autograd import shows_float16
from tnt_optim.likelihoods import Likelihood, Masked, parts_of
from tnt_optim.messages import guide, warn_the_caller
from tnt_optim.modes import Settings

_COMPARED = 1 << 20  # about how many entries of an output are compared
# A ratio of sizes beyond this factor means another reduction, not noise.
_FACTOR = 3.0
# A ratio above this means a scaled loss, unless it is the batch size.
_SCALED = 100.0
# A probability this close to 0 or 1 may round to it, and then gives no gradient.
_SURE = 1e-4


@dataclass
class Comparison:
    """Some rows of an output, and their training gradient, once the backward has given it."""

    likelihood: str
    shape: torch.Size  # of the whole output
    output: Tensor
    size_matters: bool
    mask: Tensor | None  # whether each of these rows counts, by ``Masked``
    gradient: Tensor | None = None

    def warn(self, micro_batches: int) -> None:
        """Warns if the gradient does not fit."""
        if self.gradient is None:
            return
        counted = self.gradient.abs().amax(1) > 0
        output, gradient = self.output[counted], self.gradient[counted]
        if not len(gradient) or not gradient.isfinite().all():
            return
        idle, sampled = self._idle_rows()
        if idle:
            warn_the_caller(
                f"{idle} of the {sampled} rows of the output that were compared get no gradient "
                "from the training loss, but labels were sampled for them. If they are padding, "
                "pass tnt_optim.Masked(output, mask), with a mask of the rows that count, in place "
                "of the output (compared at the first step only)"
            )
        whole = math.prod(self.shape[:-1]) if self.likelihood == "categorical" else self.shape[0]
        examples = whole * float(counted.float().mean())
        reason = _kind_mismatch(self, output, gradient)
        if reason is None and self.size_matters:
            reason = _scale_mismatch(self, output, gradient, examples, micro_batches)
        if reason is not None:
            warn_the_caller(
                f"likelihood {self.likelihood!r} does not fit the training loss: {reason}. "
                f"{guide('likelihoods')} lists losses (compared at the first step only)"
            )

    def _idle_rows(self) -> tuple[int, int]:
        """How many rows the mask counts but the training loss does not, and how many it counts.

        Rows without a gradient because they are sure of their label are left out of the former.
        """
        assert self.gradient is not None
        idle = self.gradient.abs().amax(1) == 0
        if self.likelihood != "gaussian":
            is_categorical = self.likelihood == "categorical"
            shares = self.output.softmax(1) if is_categorical else self.output.sigmoid()
            idle &= torch.minimum(shares, 1 - shares).amax(1) > _SURE
        mask = torch.ones_like(idle) if self.mask is None else self.mask
        return int((idle & mask).sum()), int(mask.sum())


def watched(likelihood: Likelihood, output: Any, groups: Iterable[Settings]) -> list[Comparison]:
    """Comparisons of the parts of an output with the gradients of the coming backward.

    Sizes are not compared if damping is relative and steps are grafted: the likelihood's scale then
    changes nothing; nor if the output's graph may have float16, because such losses are scaled.
    """
    if callable(likelihood):
        return []
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return []
    matters = any(not (group["relative_damping"] and group["graft"]) for group in groups)
    masked = [
        (name, part if isinstance(part, Masked) else Masked(part, None))
        for name, part in parts_of(likelihood, output)
    ]
    parts = [(name, part) for name, part in masked if type(part.output) is Tensor]
    # Not two views of one tensor (similarities and their transpose): each gets both gradients.
    wholes = [_whole(part.output) for _, part in parts]
    alone = [sum(whole is other for other in wholes) == 1 for whole in wholes]
    return [
        _watched(name, part, matters and not shows_float16(part.output))
        for name, part in compress(parts, alone)
    ]


def _whole(output: Tensor) -> Tensor:
    """The base of an output that is a view of all its entries, else the output itself."""
    base = output._base
    if base is None or base.is_nested or base.numel() != output.numel():
        return output
    return base


def _watched(likelihood: str, part: Masked, size_matters: bool) -> Comparison:
    output, mask = part.output, part.mask
    rows = _some_rows(likelihood, output.detach())
    if mask is not None:
        mask = mask.flatten()[:: _stride(output)].to(rows.device, torch.bool, copy=True)
    comparison = Comparison(likelihood, output.shape, rows, size_matters, mask)
    # The graph owns the hook, which refers to the comparison weakly and is removed without it.
    reference, shape = weakref.ref(comparison), output.shape

    @_disable_dynamo  # a compiled training step would make a graph of it
    def keep(gradient: Tensor | None) -> None:
        target = reference()
        if target is None:
            handle.remove()
        elif gradient is not None and gradient.dtype != torch.float16:
            # (float16 loses small entries.) The last gradient is kept: others may be another
            # optimizer's, at sampled labels.
            target.gradient = _some_rows(likelihood, gradient.detach().reshape(shape))

    source, base = output, _whole(output)
    if base.requires_grad and base.is_contiguous() and output.is_contiguous():
        source = base  # the loss may use another view of it, such as flattened logits
    handle = source.register_hook(keep)
    return comparison


def _some_rows(likelihood: str, values: Tensor) -> Tensor:
    """A copy of some rows, (n, classes), or examples, (n, outputs)."""
    rows = values.reshape(-1, values.shape[-1]) if likelihood == "categorical" else values
    some = rows.reshape(len(rows), -1)[:: _stride(values)]
    return some.to(torch.promote_types(some.dtype, torch.float32), copy=True)


def _stride(values: Tensor) -> int:
    """The step between compared rows; odd, so that they take several positions of sequences."""
    return -(-values.numel() // _COMPARED) | 1


def _kind_mismatch(of: Comparison, z: Tensor, g: Tensor) -> str | None:
    """The message if the loss is of another kind; None if it may fit."""
    are_shares = bool(((z >= 0) & (z <= 1)).all() and z.numel() >= 16 and (z != z[:1]).any())
    binary = _fits_labels(z.sigmoid(), g)
    if of.likelihood == "bernoulli" and are_shares and not binary:
        return "all outputs are between 0 and 1. Observe logits, the argument of sigmoid"
    classes = of.shape[-1] if len(of.shape) > 1 else 1
    sums_to_zero = g.reshape(-1, classes).sum(1).square().sum() <= 0.01 * g.square().sum()
    if of.likelihood != "categorical":
        if z.numel() < 16 or z.amax() - z.amin() < 0.25:  # squares of small outputs look alike
            return None
        softmax = z.reshape(-1, classes).softmax(1).view_as(z)
        if sums_to_zero and not binary and _fits_labels(softmax, g):
            return "its gradient is that of a cross entropy: use likelihood='categorical'"
        if binary and of.likelihood == "gaussian":
            return "its gradient is that of a binary cross entropy: use likelihood='bernoulli'"
        return None
    if sums_to_zero:
        return None
    if z.logsumexp(1).abs().amax() < 0.01:  # log-probabilities, for F.nll_loss
        return None
    reason = "rows of its gradient do not sum to zero, so it is no function of softmax(output). "
    if bool((z >= 0).all()) and (z.sum(1) - 1).abs().amax() < 0.01:
        return reason + "The output's rows sum to one: observe the argument of softmax"
    if are_shares:
        return reason + (
            "All outputs are between 0 and 1: if sigmoid was applied for a binary cross entropy, "
            "observe its argument with 'bernoulli'; for a squared error use 'gaussian'"
        )
    if binary:
        return reason + ("It looks like a binary cross entropy: use likelihood='bernoulli'")
    reason += "If it is a squared error, use likelihood='gaussian'; otherwise a function"
    return reason + ("; or classes are not the last dimension" if len(of.shape) > 2 else "")


def _fits_labels(shares: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is c (shares - y) with labels y of 0 and 1, and c < 0 if maximized."""
    for g in (gradient, -gradient):
        residual = (shares - (g < 0).to(shares.dtype)).abs()
        clear = residual > 0.01
        scales = g.abs()[clear] / residual[clear]
        if scales.numel() > 1 and scales.amax() <= 1.05 * scales.amin():
            return True
    return False


def _scale_mismatch(
    of: Comparison, z: Tensor, g: Tensor, examples: float, micro_batches: int
) -> str | None:
    """The message if the loss is reduced in another way; None if it may fit.

    ``least`` and ``most`` bound the ratio of the training gradient to the likelihood's. Residuals
    of a cross entropy are at most 1 and may be small, so only bounds are known.
    """
    name, outputs = of.likelihood, z.shape[1]
    least = most = examples * float(g.square().mean().sqrt())
    if name == "categorical":
        least, most = examples * float(g.abs().amax(1).median()), math.inf
    elif name == "bernoulli":
        shares = z.sigmoid()
        most /= float((shares * (1 - shares)).mean().sqrt())
        least = examples * float(g.abs().median())
    is_sum = examples / _FACTOR < least < 2 * _FACTOR * examples
    if least > _FACTOR and (is_sum or (least < _SCALED and name != "gaussian")):
        return (
            f"its gradient is about {least:.2g} times as large"
            + (f", as that of a sum over the batch of {examples:.0f}" if is_sum else "")
            + ". The likelihood's loss is a mean over it"
        )
    mean = {"bernoulli": 1 / outputs, "gaussian": 2 / outputs}.get(name, 0.0)
    smaller = [size for size in (most, most * micro_batches) if size * _FACTOR < 1]
    if len(smaller) == 2 and any(mean / _FACTOR < size < mean * _FACTOR for size in smaller):
        loss = "F.mse_loss" if name == "gaussian" else "the default of torch's losses"
        return (
            f"its gradient is about {most:.2g} times as large, as that of a mean over outputs, "
            f"which {loss} is: {mean:.2g} times the likelihood's loss, which is a sum over them"
            + (" (or residuals are small)" if name == "gaussian" else "")
        )
    return None
