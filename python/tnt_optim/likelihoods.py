"""Losses at labels sampled from the model; their gradients refresh the statistics.

The gradient of the loss at labels from the model's own predictive distribution has mean zero, and
its covariance is the Fisher matrix. The training gradient has neither property. Ren & Goldfarb
2021, section 3. A new likelihood is one function here and its entry in ``LIKELIHOODS``.

No function reads a value on the host. A NaN output gives a NaN loss and no exception: the optimizer
decides what to skip.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# One of LIKELIHOODS, or a user's function from the output to the loss at labels that it samples.
Likelihood = str | Callable[[Any], Tensor]

# Half of GradScaler's first scale: float16 then holds gradients of a mean loss up to 2.
LARGEST_SCALE = 2**15


def categorical(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Cross entropy, mean over rows, at classes drawn from softmax(logits); logits (N, C)."""
    if logits.dim() != 2:
        raise ValueError(
            f"output must be (batch, classes) for likelihood 'categorical', got "
            f"{tuple(logits.shape)}; bring classes last and flatten the rest into rows"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            "output must have at least two classes for likelihood 'categorical', got "
            f"{tuple(logits.shape)}; a single output is 'bernoulli' or 'gaussian'"
        )
    return F.cross_entropy(logits, drawn_classes(logits.detach(), generator))


def drawn_classes(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One class for each row, from softmax(logits): the first whose cumulative share is above u.

    ``torch.multinomial`` waits for the device, and a Gumbel maximum draws a number for each logit.
    """
    shares = logits.softmax(1).cumsum(1)
    uniform = torch.rand(
        *(len(logits), 1), generator=generator, dtype=logits.dtype, device=logits.device
    )
    # Below the sum, also after rounding: a class of probability 0 at the end is never drawn.
    total = shares[:, -1:]
    drawn = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    # Not a class if the logits are NaN; the loss is then NaN with any.
    found = torch.searchsorted(shares, drawn, right=True).squeeze(1)
    return found.clamp(max=logits.shape[1] - 1)


def bernoulli(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Binary cross entropy, mean over N of sums, at draws from sigmoid(logits); logits (N, ...)."""
    _check_batched("bernoulli", logits)
    uniform = torch.empty_like(logits, requires_grad=False).uniform_(generator=generator)
    labels = (uniform < logits.detach().sigmoid()).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / logits.shape[0]


def gaussian(mean: Tensor, generator: torch.Generator) -> Tensor:
    """Half the squared error, mean over N of sums, at draws from N(mean, I); means (N, ...)."""
    _check_batched("gaussian", mean)
    noise = torch.empty_like(mean, requires_grad=False).normal_(generator=generator)
    labels = mean.detach() + noise
    return (mean - labels).square().sum() / (2 * mean.shape[0])


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

    A function draws from the global generators of the CPU and ``devices``, which are restored.
    """
    seed = stream_seed(seed, *key)
    if callable(likelihood):
        with seeded_globally(seed, devices):
            return check_scalar_loss("likelihood", likelihood(output))
    if not isinstance(output, Tensor) or not output.is_floating_point():
        got = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"output must be a floating-point tensor, got {got}")
    if not output.requires_grad:
        raise ValueError("output must have a graph, got a tensor that requires no gradient")
    generator = torch.Generator(output.device).manual_seed(seed)
    return sampled_loss(likelihood, output, generator)


def sampled_loss(likelihood: str, output: Tensor, generator: torch.Generator) -> Tensor:
    """The mean over the batch of -log p(y | output), with one y drawn for each example.

    ``output`` has any float dtype; half precision is computed in float32.
    """
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if output.dim() > 0 and output.shape[0] == 0:
        raise ValueError(f"output must hold at least one example, got {tuple(output.shape)}")
    return LIKELIHOODS[likelihood](output, generator)


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
        raise ValueError(
            f"output must be (batch, outputs, ...) for likelihood {likelihood!r}, got "
            f"{tuple(output.shape)}; unsqueeze(1) if there is one output for each example"
        )
