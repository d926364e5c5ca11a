"""Losses at labels sampled from the model; their gradients refresh the statistics.

The gradient of the loss at labels from the model's own predictive distribution has mean zero, and
its covariance is the Fisher matrix. The training gradient has neither property. Ren & Goldfarb
2021, section 3. A new likelihood is one function here and its entry in ``LIKELIHOODS``.

No function reads a value on the host. A NaN output gives a NaN loss and no exception: the optimizer
decides what to skip.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A name of LIKELIHOODS, a tuple of names for the parts of the output, or a user's function from the
# output to the loss at labels that it samples.
Likelihood = str | tuple[str, ...] | Callable[[Any], Tensor]

# Half of GradScaler's first scale: float16 then holds gradients of a mean loss up to 2.
LARGEST_SCALE = 2**15


class Masked(NamedTuple):
    """An output of which some rows do not count, such as padding.

    It stands for the output wherever an optimizer takes one. The loss is the mean over the rows
    that count, as in ``F.cross_entropy`` with ``ignore_index``; the others get no gradient. If no
    row counts, the observation is left out.
    """

    output: Tensor
    # True counts; (...) for the logits (..., classes) of "categorical", else (N,). None: all count.
    mask: Tensor | None


NO_LOSS = "observe the model's output, not the loss"


def categorical(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Cross entropy of each row, at a class drawn from its softmax; logits (..., classes)."""
    if logits.dim() < 2:
        hint = "a single output is 'bernoulli' or 'gaussian'" if logits.dim() else NO_LOSS
        raise ValueError(
            f"output must be (batch, ..., classes) for likelihood 'categorical', got "
            f"{tuple(logits.shape)}; {hint}"
        )
    if logits.shape[-1] < 2:
        raise ValueError(
            "output must have at least two classes for likelihood 'categorical', got "
            f"{tuple(logits.shape)}; a single output is 'bernoulli' or 'gaussian'"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, drawn_classes(rows.detach(), generator), reduction="none")


def drawn_classes(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a class for each row of softmax(logits): the first with cumulative probability above u.

    ``torch.multinomial`` waits for the device, and a Gumbel maximum draws a number for each logit.
    """
    cumulative = logits.softmax(1).cumsum(1)
    uniform = torch.rand(
        *(len(logits), 1), generator=generator, dtype=logits.dtype, device=logits.device
    )
    # Keep u below the total after rounding, too: a last class of probability 0 is never drawn.
    total = cumulative[:, -1:]
    drawn = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    # With NaN logits the index is too large. The loss is then NaN at any class.
    classes = torch.searchsorted(cumulative, drawn, right=True).squeeze(1)
    return classes.clamp(max=logits.shape[1] - 1)


def bernoulli(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Binary cross entropy of each example, summed, at draws from sigmoid(logits); (N, ...)."""
    _check_batched("bernoulli", logits)
    uniform = torch.empty_like(logits, requires_grad=False).uniform_(generator=generator)
    labels = (uniform < logits.detach().sigmoid()).to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.flatten(1).sum(1)


def gaussian(mean: Tensor, generator: torch.Generator) -> Tensor:
    """Half the squared error of each example, summed, at draws from N(mean, I); means (N, ...)."""
    _check_batched("gaussian", mean)
    noise = torch.empty_like(mean, requires_grad=False).normal_(generator=generator)
    labels = mean.detach() + noise
    return (mean - labels).square().flatten(1).sum(1) / 2


# Functions from an output to the losses of its rows or examples.
LIKELIHOODS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "categorical": categorical,
    "bernoulli": bernoulli,
    "gaussian": gaussian,
}


def check_scalar_loss(name: str, loss: Any) -> Tensor:
    """Refuses all but 0-dim tensors with a graph; ``name`` is what gave the loss."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{name} must give a 0-dim tensor, got {got}")
    if not loss.requires_grad:
        raise ValueError(f"{name} must have a graph, got a tensor that requires no gradient")
    return loss


def sample_scale(examples: int) -> float:
    """Largest power of two <= the number of examples, at most ``LARGEST_SCALE``."""
    return float(min(2 ** (examples.bit_length() - 1), LARGEST_SCALE))


def loss_at_samples(
    likelihood: Likelihood,
    output: Any,
    seed: int,
    key: tuple[int | str, ...],
    devices: set[torch.device],
) -> Tensor:
    """-log p at labels drawn from the random stream that the seed and ``key`` name.

    A function draws from the global generators of the CPU and ``devices``, which are restored. Each
    part of a composite likelihood has its own random stream; the losses are added.
    """
    if callable(likelihood):
        with seeded_globally(stream_seed(seed, *key), devices):
            return check_scalar_loss("likelihood", likelihood(output))
    losses = []
    for index, (name, part) in enumerate(parts_of(likelihood, output)):
        values, mask = part if isinstance(part, Masked) else (part, None)
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"output must be a floating-point tensor, got {got}")
        if not values.requires_grad:
            raise ValueError("output must have a graph, got a tensor that requires no gradient")
        if isinstance(likelihood, tuple) and values.dim() == 1:  # a value for each example
            values = values.unsqueeze(1)
        part_key = key if isinstance(likelihood, str) else (*key, index)
        generator = torch.Generator(values.device).manual_seed(stream_seed(seed, *part_key))
        losses.append(sampled_loss(name, values, generator, mask))
    return functools.reduce(torch.add, losses)


def parts_of(likelihood: str | tuple[str, ...], output: Any) -> list[tuple[str, Any]]:
    """Each likelihood with its part of the output, a tensor or ``Masked``."""
    if isinstance(likelihood, str):
        return [(likelihood, output)]
    if not isinstance(output, tuple | list) or isinstance(output, Masked):
        raise ValueError(f"output must be a tuple for {likelihood}, got {type(output).__name__}")
    if len(output) != len(likelihood):
        raise ValueError(
            f"output must have a part for each of {likelihood}, got {len(output)} parts"
        )
    return list(zip(likelihood, output, strict=True))


def sampled_loss(
    likelihood: str, output: Tensor, generator: torch.Generator, mask: Tensor | None = None
) -> Tensor:
    """The mean over the batch of -log p(y | output), with one y drawn for each example.

    ``output`` has any float dtype; half precision is computed in float32.
    """
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if output.numel() == 0:
        raise ValueError(f"output must hold at least one example, got {tuple(output.shape)}")
    losses = LIKELIHOODS[likelihood](output, generator)
    if mask is None:
        return losses.sum() / len(losses)
    wanted = output.shape[:-1] if likelihood == "categorical" else output.shape[:1]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != wanted:
        got = (
            f"{mask.dtype}, {tuple(mask.shape)}"
            if isinstance(mask, Tensor)
            else type(mask).__name__
        )
        raise ValueError(
            f"mask must be bool, {tuple(wanted)} for likelihood {likelihood!r}, got {got}"
        )
    mask = mask.reshape(-1).to(losses.device)
    return losses.where(mask, 0.0).sum() / mask.sum().clamp(min=1)


def example_count(likelihood: str | tuple[str, ...], output: Any) -> int:
    """The number of examples, rows for "categorical"; a composite's first part decides."""
    name, part = parts_of(likelihood, output)[0]
    values = part.output if isinstance(part, Masked) else part
    return math.prod(values.shape[:-1]) if name == "categorical" else len(values)


def share_counted(likelihood: Likelihood, output: Any) -> float | Tensor:
    """The fraction of rows that count: 1.0 without a mask, else on the device.

    For a composite likelihood, the largest fraction of its parts.
    """
    parts = [] if callable(likelihood) else [part for _, part in parts_of(likelihood, output)]
    masks = [part.mask for part in parts if isinstance(part, Masked) and part.mask is not None]
    # The loss refuses masks that are not bool.
    shares = [m.double().mean() for m in masks if getattr(m, "dtype", None) == torch.bool]
    if not shares:
        return 1.0
    return torch.stack(shares).amax() if len(shares) == len(parts) else torch.ones_like(shares[0])


def with_rows(likelihood: Likelihood, outputs: Iterable[Any]) -> Iterator[Any]:
    """The outputs in which a row counts. The host waits for the device."""
    return (output for output in outputs if share_counted(likelihood, output) > 0)


def stream_seed(*key: int | str) -> int:
    """Returns the seed of a random stream: equal keys give equal seeds, others unrelated ones.

    >>> stream_seed(0, "step", 7) == stream_seed(0, "step", 7) != stream_seed(0, "step", 8)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")


@contextmanager
def seeded_globally(seed: int, devices: set[torch.device]) -> Iterator[None]:
    """Seeds the global generators of the CPU and ``devices``, and restores them on leaving."""
    cuda = sorted(device.index for device in devices if device.type == "cuda")
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def _check_batched(likelihood: str, output: Tensor) -> None:
    if output.dim() < 2:
        hint = "unsqueeze(1) if there is one output for each example" if output.dim() else NO_LOSS
        raise ValueError(
            f"output must be (batch, outputs, ...) for likelihood {likelihood!r}, got "
            f"{tuple(output.shape)}; {hint}"
        )
