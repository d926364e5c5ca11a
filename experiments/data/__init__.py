"""The experiments' data, one data set a file; every reader names the file that it finds broken."""

from experiments.data.cifar import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    CIFAR100_MEAN,
    CIFAR100_STD,
    Cifar,
    cifar10,
    cifar100,
    crop_and_flip,
    normalised,
)
from experiments.data.curves import curves_images
from experiments.data.digits import digits_images
from experiments.data.faces import Faces, faces_images
from experiments.data.mnist import mnist_16x16, mnist_images, mnist_labels, read_idx
from experiments.data.text import Text, read_text

__all__ = [
    "CIFAR100_MEAN",
    "CIFAR100_STD",
    "CIFAR10_MEAN",
    "CIFAR10_STD",
    "Cifar",
    "Faces",
    "Text",
    "cifar10",
    "cifar100",
    "crop_and_flip",
    "curves_images",
    "digits_images",
    "faces_images",
    "mnist_16x16",
    "mnist_images",
    "mnist_labels",
    "normalised",
    "read_idx",
    "read_text",
]
