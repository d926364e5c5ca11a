"""The parameter sets with a model around them, on random data of the right shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.costs.step_kinds import TrainingStep
from experiments.models import (
    FACES_WIDTHS,
    MNIST_WIDTHS,
    CharacterTransformer,
    autoencoder,
    reconstruction_loss,
    resnet32,
    seeded,
    squared_error,
    vgg16,
)
from experiments.runs.first_order import hidden_matrices
from experiments.runs.methods import METHODS, build_optimizer, has_statistics, takes_graft
from experiments.runs.settings import Settings
from tnt_optim.kfac.layers import matrix_shape, supported_layers
from tnt_optim.modes import diagonal_modes, mode_shape

Examples = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
MAX_FACTOR_DIM = 8192  # the optimizers' default
_CHARACTERS = 65  # in tiny Shakespeare

# (learning rate, damping): small steps that stay finite; a step's time does not depend on them, but
# for the number of Newton's iterations, so Shampoo has the damping of the paper's autoencoders.
_RATES: dict[str, tuple[float, float | None]] = {
    "sgd": (1e-3, None),
    "adam": (1e-4, 1e-4),
    "tnt": (1e-5, 0.1),
    "tnt-ef": (1e-5, 0.1),
    "kfac": (1e-3, 0.3),
    "kfac-eigen": (1e-3, 0.3),
    "shampoo": (1e-4, 3e-4),
    "muon": (1e-4, None),
}


@dataclass(frozen=True)
class StepSet:
    """A model and what one of its batches is like.

    Attributes:
        name: as in the kernels' parameter sets, where it is one of them.
        build: makes the model.
        examples: draws inputs and targets for a batch.
        batch_size: how many.
        loss: of outputs and targets.
        likelihood: of the outputs.
        kfac: which form of KFAC; the paper's for its problems.
        intervals: T1 and T2, the paper's for its problems.
        note: what is different from training in earnest.
    """

    name: str
    build: Callable[[], nn.Module]
    examples: Examples
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor]
    likelihood: str
    kfac: str
    intervals: tuple[int, int]
    note: str = ""

    @property
    def convolutional(self) -> bool:
        """Whether the model's inputs are images."""
        return self.kfac == "kfac-eigen"

    def methods(self) -> tuple[str, ...]:
        """What is compared; Muon only where it has a matrix in a hidden layer."""
        with torch.device("meta"):
            muon = ("muon",) if hidden_matrices(self.build()) else ()
        return ("sgd", "adam", *muon, "tnt", "tnt-ef", self.kfac, "shampoo")

    def training_step(self, method: str, device: torch.device) -> TrainingStep:
        """A method's training step, on the model and the batch that all methods have."""
        model = seeded(self.build, 0).to(device)
        if self.convolutional and device.type == "cpu":
            # As the experiments train it.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs, targets = self.examples(self.batch_size, torch.Generator().manual_seed(0))
        return TrainingStep(
            model=model,
            optimizer=build_optimizer(model, step_settings(self, method), self.likelihood),
            inputs=inputs.to(device),
            targets=targets.to(device),
            loss=self.loss,
            observes=METHODS[method].statistics == "sampled",
        )


def step_settings(step_set: StepSet, method: str) -> Settings:
    """A method's settings, with statistics and inverses at every step until it is told when."""
    lr, damping = _RATES[method]
    second_order = has_statistics(method)
    return Settings(
        optimizer=method,
        lr=lr,
        damping=damping,
        momentum=0.9,
        stat_decay=METHODS[method].stat_decay,
        weight_decay=0.0,
        stat_interval=1 if second_order else None,
        inverse_interval=1 if second_order else None,
        warm_start=False if second_order else None,
        relative_damping=False if takes_graft(method) else None,
        graft=None,
        schedule="constant",
        batch_size=step_set.batch_size,
        epochs=1,
        seed=0,
    )


def factor_sizes(model: nn.Module, method: str) -> list[int]:
    """The sizes of all full factors that a second-order method has of a model.

    >>> factor_sizes(nn.Linear(3, 2), "shampoo"), factor_sizes(nn.Linear(3, 2), "kfac")
    ([2, 3, 2], [2, 4])
    """
    if method.startswith("kfac"):
        return [size for layer in supported_layers(model)[1] for size in matrix_shape(layer)]
    views = [mode_shape(parameter.shape) for parameter in model.parameters()]
    return [
        size
        for view in views
        for size, flat in zip(view, diagonal_modes(view, MAX_FACTOR_DIM), strict=True)
        if not flat
    ]


def _pixels(pixels: int) -> Examples:
    def draw(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.rand(count, pixels, generator=rng)
        return images, images

    return draw


def _images(classes: int) -> Examples:
    def draw(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, 32, 32, generator=rng)
        return images, torch.randint(classes, (count,), generator=rng)

    return draw


def _text(context: int) -> Examples:
    def draw(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(_CHARACTERS, (count, context + 1), generator=rng)
        return text[:, :-1].contiguous(), text[:, 1:].flatten()

    return draw


_AUTOENCODER, _NETWORK = (1, 20), (10, 100)  # the paper's T1 and T2
_ALL = (
    StepSet(
        *("mnist_ae", lambda: autoencoder(MNIST_WIDTHS), _pixels(784), 1000),
        *(reconstruction_loss, "bernoulli", "kfac", _AUTOENCODER),
    ),
    StepSet(
        *("faces_ae", lambda: autoencoder(FACES_WIDTHS), _pixels(625), 1000),
        *(squared_error, "gaussian", "kfac", _AUTOENCODER),
    ),
    StepSet(
        *("resnet32", resnet32, _images(10), 128),
        *(functional.cross_entropy, "categorical", "kfac-eigen", _NETWORK),
    ),
    StepSet(
        *("vgg16", vgg16, _images(100), 32),
        *(functional.cross_entropy, "categorical", "kfac-eigen", _NETWORK),
        note="batches of 32, not the paper's 128",
    ),
    StepSet(
        "gpt2",
        lambda: CharacterTransformer(_CHARACTERS, width=768, layers=2, heads=12, context=64),
        *(_text(64), 8, functional.cross_entropy, "categorical", "kfac", _NETWORK),
        note="GPT-2's width, 2 of its 12 blocks, 65 characters and not its 50257 tokens, no "
        "biases; 8 sequences of 64",
    ),
    StepSet(
        "square4096",
        lambda: nn.Sequential(nn.Linear(4096, 4096, bias=False)),
        *(_pixels(4096), 256, squared_error, "gaussian", "kfac", _NETWORK),
        note="one layer, without a bias; batches of 256",
    ),
    StepSet(
        "characters",
        lambda: CharacterTransformer(_CHARACTERS, width=128, layers=2, heads=4, context=64),
        *(_text(64), 32, functional.cross_entropy, "categorical", "kfac", _NETWORK),
        note="a transformer of width 128 with 2 blocks; 32 sequences of 64 characters",
    ),
)
STEP_SETS = {step_set.name: step_set for step_set in _ALL}
QUICK_SETS = ("mnist_ae", "resnet32")
