"""What the page has a section of: each an experiment, by whose records it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.figures.evidence import Record, by_method, is_tuned
from experiments.figures.tables import (
    TableOf,
    complexity_table,
    cosine_table,
    idealized_table,
    language_table,
    search_table,
    sensitivity_table,
    step_table,
    training_table,
)


@dataclass(frozen=True)
class Subject:
    """One section.

    Attributes:
        name: the stage's that makes its record, where there is one.
        title: its heading.
        matches: whether a record is of it.
        table: the record's numbers.
        note: what a reader must know, in a sentence or two.
    """

    name: str
    title: str
    matches: Callable[[Record], bool]
    table: TableOf
    note: str = ""


def _experiment(name: str) -> Callable[[Record], bool]:
    return lambda record: record.experiment == name


def _autoencoder(problem: str, tuned: bool = False) -> Callable[[Record], bool]:
    def matches(record: Record) -> bool:
        if (record.experiment, record.protocol.get("problem")) != ("autoencoder", problem):
            return False
        # Of other settings alone nothing is judged: no section of the paper's for them.
        return is_tuned(record) is tuned and bool(by_method(record))

    return matches


def _network(problem: str) -> Callable[[Record], bool]:
    def matches(record: Record) -> bool:
        if record.experiment != "cnn":
            return False
        return any(run["problem"] == problem for run in record.runs)

    return matches


_LABELS = "Labelled in the paper's LaTeX source:"
SUBJECTS: Sequence[Subject] = (
    Subject(
        "cosine",
        "Figure 1: directions beside block Fisher's",
        _experiment("cosine"),
        cosine_table,
        f"{_LABELS} fig_8. The paper does not say how dampings were chosen. Every method is judged "
        "with the one with which it trained best; those that are most similar stand beside.",
    ),
    Subject(
        "mnist",
        "Figures 2a and 4a: autoencoder on MNIST",
        _autoencoder("mnist"),
        training_table,
        f"{_LABELS} fig_3 and fig_10; settings of Tables 3 and 6.",
    ),
    Subject(
        "faces",
        "Figures 2b and 4b: autoencoder on FACES",
        _autoencoder("faces"),
        training_table,
        f"{_LABELS} fig_3 and fig_10; settings of Tables 3 and 6. On patches made of the Olivetti "
        "faces losses are not comparable with the paper's.",
    ),
    Subject(
        "resnet32",
        "Figures 3a and 5a: ResNet-32 on CIFAR-10",
        _network("resnet32"),
        training_table,
        f"{_LABELS} fig_1 and fig_11; settings of Tables 4 and 7.",
    ),
    Subject(
        "vgg16",
        "Figures 3b and 5b: VGG16 on CIFAR-100",
        _network("vgg16"),
        training_table,
        f"{_LABELS} fig_1 and fig_11; settings of Tables 4 and 7. No stage makes them: one epoch "
        "of a second-order method takes two cores longer than all the rest.",
    ),
    Subject(
        "mnist-tuned",
        "Figure 6a: autoencoder on MNIST, more extensive tuning",
        _autoencoder("mnist", tuned=True),
        training_table,
        f"{_LABELS} fig_9; settings of Table 5.",
    ),
    Subject(
        "faces-tuned",
        "Figure 6b: autoencoder on FACES, more extensive tuning",
        _autoencoder("faces", tuned=True),
        training_table,
        f"{_LABELS} fig_9; settings of Table 5. No stage makes it: its time went to Figure 2b.",
    ),
    Subject(
        "complexity",
        "Table 2: memory and time beyond SGD's",
        _experiment("complexity of whole methods"),
        complexity_table,
    ),
    Subject(
        "idealized",
        "Theorem 1: the idealized TNT beside its bound",
        _experiment("idealized"),
        idealized_table,
    ),
    Subject(
        "step-times",
        "Process time: seconds of a training step",
        _experiment("step times"),
        step_table,
    ),
    Subject(
        "digits",
        "Beside the paper: autoencoder on small digits, all methods",
        _autoencoder("digits"),
        training_table,
        "No figure of the paper: Figure 2's comparison on data that need no download, where "
        "Shampoo is affordable, too; settings of the recorded search, judged on seeds that it "
        "did not have.",
    ),
    Subject(
        "curves",
        "Beside the paper: autoencoder on generated curves",
        _autoencoder("curves"),
        training_table,
        "No figure of the paper: Figure 2's comparison on data that need no download, with the "
        "paper's settings for MNIST.",
    ),
    Subject(
        "search",
        "Beside the paper: a search over learning rates and dampings",
        _experiment("search"),
        search_table,
        "The paper's way of choosing settings (its appendix on the autoencoders). The verdict "
        "judges each seed with the settings that the other seeds choose; the table's bests are "
        "over all.",
    ),
    Subject(
        "language",
        "Beyond the paper: a character transformer",
        _experiment("transformer table"),
        language_table,
        "Learning rates are searched with as many trials for every form, and nothing else "
        "is. Tuning was not equal: the dampings of TNT, TNT-EF and Shampoo are the best of a few "
        "tried by hand at width 64, without a record, and AdamW and Muon had no second setting "
        "tried. Nothing is judged where the best rate of the worse of two is an end of its search, "
        "beyond which it may do better. At equal seconds the slower run is cut mid-schedule "
        "beside a finished baseline, which counts against it; a time to a loss is on that "
        "unfinished schedule, too.",
    ),
    Subject(
        "sensitivity",
        "Beyond the paper: one learning rate for several settings",
        _experiment("sensitivity"),
        sensitivity_table,
        "The learning rate is tuned at one point and kept while batch size, T2, damping and width "
        "change. A regret is the loss with a rate less that with the best one at the same point.",
    ),
)
