"""Labels drawn from a model's own predictive distribution, and their loss.

The gradient of that loss has mean zero and the Fisher matrix as covariance (the empirical gradient
has neither), which is what makes the tensor-normal model of it apply. Ren & Goldfarb 2021, section
3.

No function here reads a value on the host, and a NaN output gives a NaN loss, never an exception:
a step that is skipped for one is the optimizer's decision.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tnt_optim.autograd import check_scalar_loss

# One of LIKELIHOODS, or a user's own function from the output to the loss at labels it samples.
Likelihood = str | Callable[[Any], Tensor]


# Half of what GradScaler begins with: the gradient of a mean over a batch may be up to 2 then.
LARGEST_SCALE = 2**15


def categorical(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Cross entropy, mean over rows, at classes drawn from softmax(logits); logits (N, C)."""
    if logits.dim() != 2:
        raise ValueError(
            f"output must be (batch, classes) for likelihood 'categorical', got "
            f"{tuple(logits.shape)}; bring classes last and flatten the rest into rows"
        )
    # argmax(z - log E), E ~ Exp(1), has the law softmax(z); torch.multinomial reads on the host.
    noise = torch.empty_like(logits, requires_grad=False).exponential_(generator=generator)
    labels = (logits.detach() - noise.log()).argmax(dim=1)
    return F.cross_entropy(logits, labels)


def bernoulli(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Binary cross entropy, sum over outputs, mean over the batch, at draws from sigmoid(logits).

    The logits are (N, ...).
    """
    _check_batched("bernoulli", logits)
    uniform = torch.empty_like(logits, requires_grad=False).uniform_(generator=generator)
    labels = (uniform < logits.detach().sigmoid()).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / logits.shape[0]


def gaussian(mean: Tensor, generator: torch.Generator) -> Tensor:
    """Half the squared error, sum over outputs, mean over the batch, at draws from N(mean, I).

    The means are (N, ...).
    """
    _check_batched("gaussian", mean)
    noise = torch.empty_like(mean, requires_grad=False).normal_(generator=generator)
    labels = mean.detach() + noise
    return (mean - labels).square().sum() / (2 * mean.shape[0])


LIKELIHOODS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "categorical": categorical,
    "bernoulli": bernoulli,
    "gaussian": gaussian,
}


def check_sampling(likelihood: Likelihood, seed: int, sample_scale: float | None = None) -> None:
    """Checks what an optimizer is told about its labels.

    Raises:
        ValueError: names the argument, the rule, and what came.
    """
    if not callable(likelihood) and likelihood not in tuple(LIKELIHOODS):
        known = ", ".join(repr(name) for name in LIKELIHOODS)
        raise ValueError(f"likelihood must be {known} or a function, got {likelihood!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    if sample_scale is not None and not (sample_scale > 0 and math.frexp(sample_scale)[0] == 0.5):
        raise ValueError(f"sample_scale must be a power of two or None, got {sample_scale!r}")


def sample_scale(examples: int) -> float:
    """The power of two that turns a mean over so many examples into about a sum, or less."""
    return float(min(2 ** (examples.bit_length() - 1), LARGEST_SCALE))


def loss_at_samples(
    likelihood: Likelihood,
    output: Any,
    seed: int,
    key: tuple[int | str, ...],
    devices: set[torch.device],
) -> Tensor:
    """-log p at labels drawn from the stream that a seed and a key name.

    Args:
        likelihood: one of ``LIKELIHOODS``, or a function that draws from the global generators.
        output: the model's output, with its graph.
        seed: the optimizer's.
        key: names the draws among those of the seed.
        devices: whose generators such a function may draw from; they are put back.

    Raises:
        ValueError: where the output, or what the function returns, does not fit.
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
    """Returns the mean over the batch of -log p(y | output), with one y drawn for each example.

    Args:
        likelihood: "categorical", "bernoulli" or "gaussian".
        output: the model's output, in any float dtype; half precision is computed in float32.
        generator: where the draws come from, on the output's device.

    Returns:
        A 0-dim tensor with the output's graph.

    Raises:
        ValueError: where the output has the wrong number of dimensions, or no example.
    """
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    if output.dim() > 0 and output.shape[0] == 0:
        raise ValueError(f"output must hold at least one example, got {tuple(output.shape)}")
    return LIKELIHOODS[likelihood](output, generator)


def stream_seed(*key: int | str) -> int:
    """Returns a seed for one stream of draws: equal keys give equal seeds, others unrelated ones.

    >>> stream_seed(0, "step", 7) == stream_seed(0, "step", 7) != stream_seed(0, "step", 8)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")


@contextmanager
def seeded_globally(seed: int, devices: set[torch.device]) -> Iterator[None]:
    """Seeds the global generators of the CPU and ``devices``, and puts them back on leaving."""
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
            f"{tuple(output.shape)}; unsqueeze(1) where there is one output for each example"
        )
