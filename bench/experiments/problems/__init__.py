"""What the experiments train on."""

from bench.experiments.problems.autoencoders import Autoencoder, load_autoencoder
from bench.experiments.problems.problem import Problem, seeded_model

__all__ = ["Autoencoder", "Problem", "load_autoencoder", "seeded_model"]
