"""What can be searched over: each experiment's problem, methods, settings and criterion."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.experiments import autoencoder
from bench.experiments.problems import Problem
from bench.experiments.problems.autoencoders import OPTIMIZERS as AUTOENCODER_OPTIMIZERS
from bench.experiments.problems.autoencoders import load_autoencoder, unsearched_settings
from bench.experiments.recorded_search import LOSS
from bench.experiments.settings import Settings


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        help: what it is, in a line.
        optimizers: the methods it compares.
        criterion: what a search minimises: the smoothed loss at the end, or a metric's best.
        add_arguments: adds the options that choose its problem.
        maker: from those options, a function that loads the problem; another process may call it.
        defaults: one method's settings on the problem, where its grid has nothing to say.
    """

    help: str
    optimizers: Sequence[str]
    criterion: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    maker: Callable[[argparse.Namespace], Callable[[], Problem]]
    defaults: Callable[[Problem, str], Settings]


EXPERIMENTS = {
    "autoencoder": Experiment(
        help="MNIST, FACES, CURVES or digits; the training loss counts",
        optimizers=AUTOENCODER_OPTIMIZERS,
        criterion=LOSS,
        add_arguments=autoencoder.add_data_arguments,
        maker=lambda given: functools.partial(load_autoencoder, given.data, given.examples),
        defaults=lambda problem, optimizer: unsearched_settings(problem.name, optimizer),
    ),
}
