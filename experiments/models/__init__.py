"""The models of the experiments, one family a file, and `seeded`, which starts them alike."""

from experiments.models.autoencoder import (
    CURVES_WIDTHS,
    DIGITS_WIDTHS,
    FACES_WIDTHS,
    MNIST_WIDTHS,
    autoencoder,
    loss_floor,
    reconstruction_loss,
    squared_error,
)
from experiments.models.resnet import resnet32
from experiments.models.seeding import seeded
from experiments.models.transformer import (
    CharacterTransformer,
)
from experiments.models.vgg import vgg16

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
