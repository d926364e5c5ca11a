"""The parameter sets of every benchmark: shapes of real models."""

from __future__ import annotations

from collections.abc import Sequence

from tnt_kernels.benchmark.inputs import Shape, TensorSet
from tnt_optim.modes import mode_shape


class ParameterSet(TensorSet):
    """The parameters of one model, in the shapes that the modules give them."""

    @property
    def views(self) -> list[Shape]:
        """Mode sizes as the optimizer sees them: a convolution weight has three modes."""
        return [mode_shape(shape) for shape in self.shapes]


def autoencoder(widths: Sequence[int]) -> list[Shape]:
    """Linear layers between ``widths``: weight (out, in) and bias (out,)."""
    shapes: list[Shape] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        shapes += [(outputs, inputs), (outputs,)]
    return shapes


def resnet32() -> list[Shape]:
    """ResNet-32 of He et al. 2016 (table 6) for CIFAR-10: no convolution bias, option-A shortcuts.

    A first convolution, then three stages of five blocks of two convolutions, each followed by
    batch norm; the shortcuts have no parameters.
    """
    shapes: list[Shape] = []
    channels = 3
    for width, convolutions in ((16, 1 + 10), (32, 10), (64, 10)):
        for _ in range(convolutions):
            shapes += [(width, channels, 3, 3), (width,), (width,)]
            channels = width
    return [*shapes, (10, channels), (10,)]


def vgg16() -> list[Shape]:
    """VGG16 of Simonyan & Zisserman 2015 (model D) with batch norm, for CIFAR-100."""
    return [*vgg16_convolutions(), *autoencoder((512, 4096, 4096, 100))]


def vgg16_convolutions() -> list[Shape]:
    """The 13 convolutions of VGG16, with biases, each followed by batch norm."""
    shapes: list[Shape] = []
    channels = 3
    for width in (64, 64, 128, 128, *[256] * 3, *[512] * 6):
        shapes += [(width, channels, 3, 3), (width,), (width,), (width,)]
        channels = width
    return shapes


def gpt2(blocks: int, width: int = 768, context: int = 1024) -> list[Shape]:
    """GPT-2 with ``blocks`` blocks (small: 12); the output layer shares the tokens' embedding."""
    norm: list[Shape] = [(width,), (width,)]
    block: list[Shape] = [
        *norm,
        *[(3 * width, width), (3 * width,), (width, width), (width,)],  # attention
        *norm,
        *[(4 * width, width), (4 * width,), (width, 4 * width), (width,)],  # the two-layer net
    ]
    embeddings: list[Shape] = [(50257, width), (context, width)]  # of tokens and of positions
    return [*embeddings, *block * blocks, *norm]


_ALL = (
    ParameterSet("mnist_ae", tuple(autoencoder((784, 1000, 500, 250, 30, 250, 500, 1000, 784)))),
    ParameterSet("faces_ae", tuple(autoencoder((625, 2000, 1000, 500, 30, 500, 1000, 2000, 625)))),
    ParameterSet("resnet32", tuple(resnet32())),
    ParameterSet("vgg16", tuple(vgg16())),
    ParameterSet("gpt2", tuple(gpt2(2)), "2 of its 12 identical blocks, and the embeddings"),
    ParameterSet("square4096", ((4096, 4096),)),
    # Not in the tables: for benchmarks that need a smaller set, or a larger machine.
    ParameterSet("vgg16_conv", tuple(vgg16_convolutions()), "the convolutions of vgg16 alone"),
    ParameterSet("gpt2_full", tuple(gpt2(12))),
)
PARAMETER_SETS = {s.name: s for s in _ALL}
# The default, in the order of the tables.
DEFAULT_SETS = ("mnist_ae", "faces_ae", "resnet32", "vgg16", "gpt2", "square4096")
