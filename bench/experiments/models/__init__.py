"""The models of the experiments, one family a file, and `seeded`, which starts them alike."""

from bench.experiments.models.autoencoder import (
    CURVES_WIDTHS,
    DIGITS_WIDTHS,
    FACES_WIDTHS,
    MNIST_WIDTHS,
    autoencoder,
    loss_floor,
    reconstruction_loss,
    squared_error,
)
from bench.experiments.models.resnet import resnet32
from bench.experiments.models.seeding import seeded
from bench.experiments.models.transformer import (
    CharacterTransformer,
)
from bench.experiments.models.vgg import vgg16

__all__ = [
    "CURVES_WIDTHS",
    "DIGITS_WIDTHS",
    "FACES_WIDTHS",
    "MNIST_WIDTHS",
    "CharacterTransformer",
    "autoencoder",
    "loss_floor",
    "reconstruction_loss",
    "resnet32",
    "seeded",
    "squared_error",
    "vgg16",
]
