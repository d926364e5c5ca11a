"""What can be searched over: each experiment's problem, methods, settings and criterion."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiments import autoencoder, cnn, transformer
from experiments.language.forms import command_form, form_settings
from experiments.problems import Problem
from experiments.problems.autoencoders import OPTIMIZERS as AUTOENCODER_OPTIMIZERS
from experiments.problems.autoencoders import load_autoencoder, unsearched_settings
from experiments.problems.classifiers import OPTIMIZERS as CLASSIFIER_OPTIMIZERS
from experiments.problems.classifiers import Classifier, load_classifier
from experiments.problems.classifiers import default_settings as classifier_settings
from experiments.problems.language import load_language
from experiments.runs.settings import Settings
from experiments.tuning.recorded_search import LOSS


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        help: what it is, in a line.
        optimizers: the methods it compares.
        criterion: what a search minimises: the smoothed loss at the end, or a metric's best.
        add_arguments: adds the options that choose its problem.
        maker: from those options, a function that loads the problem; another process may call it.
        defaults: one method's settings on the problem, where its grid has nothing to say, for so
            many epochs, or as many as usual.
    """

    help: str
    optimizers: Sequence[str]
    criterion: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    maker: Callable[[argparse.Namespace], Callable[[], Problem]]
    defaults: Callable[[Problem, str, int | None], Settings]


def _classifier(model: str, data: str, subset: int | None) -> Classifier:
    problem = load_classifier(model, data)
    return problem if subset is None else problem.first(subset)


def _lasting(settings: Settings, epochs: int | None) -> Settings:
    return settings if epochs is None else replace(settings, epochs=epochs)


# A transformer's run is 8 epochs of 50 steps, as its command's.
_TRANSFORMER_EPOCHS = 8

EXPERIMENTS = {
    "autoencoder": Experiment(
        help="MNIST, FACES, CURVES or digits; the training loss counts",
        optimizers=AUTOENCODER_OPTIMIZERS,
        criterion=LOSS,
        add_arguments=autoencoder.add_data_arguments,
        maker=lambda given: functools.partial(load_autoencoder, given.data, given.examples),
        defaults=lambda problem, optimizer, epochs: _lasting(
            unsearched_settings(problem.name, optimizer), epochs
        ),
    ),
    "cnn": Experiment(
        help="ResNet-32 or VGG16 on CIFAR; the best epoch's validation error counts",
        optimizers=CLASSIFIER_OPTIMIZERS,
        criterion="validation_error",
        add_arguments=cnn.add_data_arguments,
        maker=lambda given: functools.partial(_classifier, given.model, given.data, given.subset),
        defaults=lambda problem, optimizer, epochs: classifier_settings(
            problem.name, optimizer, epochs
        ),
    ),
    "transformer": Experiment(
        help="a character transformer, grafted forms; the best epoch's validation loss counts",
        optimizers=transformer.OPTIMIZERS,
        criterion="validation_loss",
        add_arguments=transformer.add_data_arguments,
        maker=lambda given: functools.partial(
            load_language,
            given.data,
            width=given.width,
            layers=given.layers,
            heads=given.heads,
            context=given.context,
        ),
        defaults=lambda problem, optimizer, epochs: form_settings(
            command_form(optimizer, paper=False), epochs or _TRANSFORMER_EPOCHS
        ),
    ),
}
