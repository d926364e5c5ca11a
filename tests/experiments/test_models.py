"""The experiments' models: their shapes, their start, and their outputs by an explicit formula."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from drawn import close
from torch import Tensor, nn
from torch.nn import functional

from experiments.methods import hidden_matrices
from experiments.models import seeded
from experiments.models.autoencoder import FACES_WIDTHS, MNIST_WIDTHS, autoencoder
from experiments.models.recurrent import CharacterGRU
from experiments.models.resnet import resnet, resnet8, resnet32
from experiments.models.transformer import Block, CharacterTransformer
from experiments.models.vgg import vgg16
from experiments.models.vision_transformer import VisionTransformer
from tools.measuring.parameter_sets import PARAMETER_SETS

CONTEXT, CHARACTERS = 9, 11


def small_transformer() -> CharacterTransformer:
    return CharacterTransformer(CHARACTERS, width=12, layers=2, heads=3, context=CONTEXT)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "autoencoder": lambda: autoencoder((20, 9, 3, 9, 20)),
    "resnet8": resnet8,
    "resnet32": resnet32,
    "vgg16": vgg16,
    "transformer": small_transformer,
    "vit": VisionTransformer,
    "gru": lambda: CharacterGRU(CHARACTERS, 12),
}


def moved(model: nn.Module) -> nn.Module:
    """In float64, with norms and biases away from 0 and 1, where a mistake in them could hide."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        for parameter in model.double().parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


# Shapes


@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("mnist_ae", lambda: autoencoder(MNIST_WIDTHS)),
        ("faces_ae", lambda: autoencoder(FACES_WIDTHS)),
        ("resnet32", resnet32),
        ("vgg16", vgg16),
    ],
)
def test_parameters_are_those_of_the_benchmarks(
    name: str, builder: Callable[[], nn.Module]
) -> None:
    shapes = tuple(tuple(parameter.shape) for parameter in builder().parameters())
    assert shapes == PARAMETER_SETS[name].shapes


@pytest.mark.parametrize("depth", [2, 9, 31])
def test_a_depth_without_whole_blocks_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth must be 6 n \+ 2 .* got {depth}"):
        resnet(depth)


# The start


def assert_drawn(tensor: Tensor, std: float) -> None:
    """Mean 0 and the standard deviation, to six deviations of each of their estimates."""
    n = tensor.numel()
    assert abs(tensor.mean().item()) < 6 * std / math.sqrt(n)
    assert abs(tensor.std().item() / std - 1) < 6 / math.sqrt(2 * n)


def is_constant(tensor: Tensor | None, value: float) -> bool:
    return tensor is not None and bool((tensor == value).all())


def test_resnet_starts_from_kaimings_normal() -> None:
    model = seeded(resnet32, 0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert_drawn(module.weight, math.sqrt(2 / (9 * module.in_channels)))
        elif isinstance(module, nn.Linear):
            assert_drawn(module.weight, math.sqrt(2 / module.in_features))
            assert 0 < module.bias.abs().max() <= 1 / math.sqrt(module.in_features)
        elif isinstance(module, nn.BatchNorm2d):
            assert is_constant(module.weight, 1) and is_constant(module.bias, 0)


def test_vgg_starts_from_the_papers_distributions() -> None:
    model = seeded(vgg16, 0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert_drawn(module.weight, math.sqrt(2 / (9 * module.out_channels)))
            assert is_constant(module.bias, 0)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            for tensor in (module.weight, module.bias):
                assert 0.9 * bound < tensor.abs().max() <= bound


@pytest.mark.parametrize("layers", [1, 4])
def test_transformer_starts_as_gpt2_does(layers: int) -> None:
    builder = lambda: CharacterTransformer(65, 64, layers, 4, 32)  # noqa: E731
    seen = 0
    for name, module in seeded(builder, 0).named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith(("attention.output", "contract"))
            seen += residual
            assert_drawn(module.weight, 0.02 / math.sqrt(2 * layers) if residual else 0.02)
    assert seen == 2 * layers


@pytest.mark.parametrize("name", BUILDERS)
def test_a_seed_decides_the_start_and_nothing_else_does(name: str) -> None:
    before = torch.get_rng_state()
    first = seeded(BUILDERS[name], 3).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state has moved"
    torch.rand(5)
    again, other = (seeded(BUILDERS[name], seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(again[key], tensor) for key, tensor in first.items())
    assert not all(torch.equal(other[key], tensor) for key, tensor in first.items())


# Outputs, against the formula on the bare parameters


def normalised(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Batch norm by its definition."""
    mean = images.mean(dim=(0, 2, 3), keepdim=True)
    variance = (images - mean).square().mean(dim=(0, 2, 3), keepdim=True)
    centred = (images - mean) / (variance + 1e-5).sqrt()
    return centred * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


def explicit_block(images: Tensor, outputs: int, parameters: Iterator[Tensor]) -> Tensor:
    """A residual block, the shortcut one channel and one pixel at a time."""
    n, channels, height, width = images.shape
    stride = 1 if outputs == channels else 2
    shortcut = images.new_zeros(n, outputs, -(-height // stride), -(-width // stride))
    first = (outputs - channels) // 2
    for channel in range(channels):
        for row in range(shortcut.shape[2]):
            for column in range(shortcut.shape[3]):
                pixels = images[:, channel, stride * row, stride * column]
                shortcut[:, first + channel, row, column] = pixels
    hidden = functional.conv2d(images, next(parameters), stride=stride, padding=1)
    hidden = normalised(hidden, next(parameters), next(parameters)).relu()
    hidden = functional.conv2d(hidden, next(parameters), padding=1)
    return (normalised(hidden, next(parameters), next(parameters)) + shortcut).relu()


def explicit_resnet(images: Tensor, parameters: Iterator[Tensor], blocks: int) -> Tensor:
    hidden = functional.conv2d(images, next(parameters), padding=1)
    hidden = normalised(hidden, next(parameters), next(parameters)).relu()
    for width in (16, 32, 64):
        for _ in range(blocks):
            hidden = explicit_block(hidden, width, parameters)
    assert hidden.shape[2:] == (8, 8)
    return hidden.mean(dim=(2, 3)) @ next(parameters).T + next(parameters)


@torch.no_grad()
def test_the_residual_network_is_that_of_the_formula() -> None:
    model = moved(seeded(resnet8, 0))
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    wanted = explicit_resnet(images, model.parameters(), 1)
    assert wanted.abs().max() > 0
    close(model(images), wanted)


@torch.no_grad()
def test_only_a_causal_block_sees_the_order_of_its_positions() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 7, 12, generator=generator, dtype=torch.float64)
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    full, causal = (seeded(lambda c=c: Block(12, 3, causal=c), 0).double() for c in (False, True))
    close(full(hidden[:, order]), full(hidden)[:, order])
    assert not torch.allclose(causal(hidden[:, order]), causal(hidden)[:, order], atol=1e-3)
    # A later position changes nothing before it, but without the mask it does.
    changed = hidden.clone()
    changed[:, -1] *= -1
    close(causal(changed)[:, :-1], causal(hidden)[:, :-1])
    assert not torch.allclose(full(changed)[:, :-1], full(hidden)[:, :-1], atol=1e-3)


# Which parameters Muon takes


def test_the_hidden_matrices_are_those_of_the_blocks_and_of_the_gru() -> None:
    layers = [*(f"attention.{n}" for n in ("query", "key", "value", "output"))]
    layers += ["expand", "contract"]
    hidden = hidden_matrices(small_transformer())
    names = [f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers]
    assert [name for name, _ in hidden] == names
    torch.optim.Muon(hidden, lr=0.01)
    recurrent = hidden_matrices(CharacterGRU(CHARACTERS, 12))
    names = ["recurrence.weight_ih_l0", "recurrence.weight_hh_l0"]
    assert [name for name, _ in recurrent] == names, "without the head"
    torch.optim.Muon(recurrent, lr=0.01)
