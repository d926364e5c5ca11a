"""What the experiments train on."""

from experiments.problems.autoencoders import Autoencoder, load_autoencoder
from experiments.problems.problem import Problem, seeded_model

__all__ = ["Autoencoder", "Problem", "load_autoencoder", "seeded_model"]
