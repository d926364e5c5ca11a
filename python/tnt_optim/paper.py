"""The settings of the paper's experiments: Tables 3, 4, 6 and 7 of Ren & Goldfarb 2021."""

from collections.abc import Mapping
from typing import Any

_AUTOENCODER = {"stat_interval": 1, "inverse_interval": 20}
_EIGENBASIS = {"damping": 0.03, "inverse": "eigenbasis", "likelihood": "categorical"}

# Settings by method and problem. A setting that is missing has its default from ``options``.
PAPER: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "TNT": {
        "mnist": {"lr": 1e-4, "damping": 0.1, "likelihood": "bernoulli", **_AUTOENCODER},
        "faces": {"lr": 1e-6, "damping": 0.003, "likelihood": "gaussian", **_AUTOENCODER},
        "resnet32": {"lr": 1e-4, "weight_decay": 10.0, "likelihood": "categorical"},
        "vgg16": {"lr": 3e-5, "weight_decay": 10.0, "likelihood": "categorical"},
    },
    "TNT-EF": {
        "mnist": {"lr": 3e-6, **_AUTOENCODER},
        "faces": {"lr": 3e-6, **_AUTOENCODER},
        "resnet32": {"lr": 1e-4, "weight_decay": 10.0},
        "vgg16": {"lr": 3e-6, "weight_decay": 100.0},
    },
    "KFAC": {
        "mnist": {"lr": 0.003, "damping": 0.3, "likelihood": "bernoulli", **_AUTOENCODER},
        "faces": {"lr": 0.1, "damping": 10.0, "likelihood": "gaussian", **_AUTOENCODER},
        "resnet32": {"lr": 0.01, "weight_decay": 0.1, **_EIGENBASIS},
        "vgg16": {"lr": 3e-4, "weight_decay": 0.1, **_EIGENBASIS},
    },
    "Shampoo": {
        "mnist": {"lr": 3e-4, "damping": 3e-4, **_AUTOENCODER},
        "faces": {"lr": 3e-4, "damping": 3e-4, **_AUTOENCODER},
        "resnet32": {"lr": 0.01, "weight_decay": 0.1},
        "vgg16": {"lr": 0.003, "weight_decay": 0.1},
    },
}


def paper_settings(table: str, problem: str | None) -> Mapping[str, Any]:
    """The settings of a problem in one table; empty if ``problem`` is None."""
    known = PAPER.get(table, {})
    if problem is not None and not known:
        raise ValueError(
            f"problem must be left out: the paper has no settings for {table}, got {problem!r}"
        )
    if problem is not None and problem not in known:
        raise ValueError(f"problem must be one of {', '.join(known)}, got {problem!r}")
    return {} if problem is None else known[problem]
