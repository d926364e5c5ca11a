"""Figures 2, 4 and 6: autoencoders on MNIST and FACES; CURVES and digits, which need no data.

Figure 2 compares TNT, KFAC, Shampoo, Adam and SGD-m (Table 3), Figure 4 TNT and TNT-EF (Table 6),
Figure 6 the methods after a search over more settings (Table 5).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments import options
from experiments.comparison import run_comparison
from experiments.methods import Settings, method_settings
from experiments.options import Quick, chosen, numbers, overridden, user_errors
from experiments.problems.autoencoders import LABELS, load_autoencoder

# Shampoo is not in the quick runs on MNIST and FACES: its matrices have up to 1000 and 2000 rows
# there, and the 20 refreshes in the first 20 steps would take longer than everything else. The
# digits' settings come from a search over seeds 1 to 5, so their runs have other seeds.
QUICK = [
    Quick("digits", 1.5, "digits --optimizer all --seeds 6,7,8,9,10"),
    Quick("curves", 2, "curves --examples 10000 --optimizer all --seeds 0,1,2 --epochs 6"),
    Quick(
        *("mnist", 5, "mnist --optimizer tnt,tnt-ef,kfac,adam,sgd --seeds 0,1 --epochs 2"),
        needs_data=True,
    ),
    Quick(
        *("mnist-tuned", 3.5, "mnist --table 5 --optimizer tnt,adam,sgd --seeds 0,1 --epochs 3"),
        needs_data=True,
    ),
    Quick(
        *("faces", 5, "faces --examples 10000 --optimizer tnt,kfac,adam,sgd --seeds 0,1"),
        needs_data=True,
    ),
]

# The paper's methods in its order, with TNT-EF after TNT.
OPTIMIZERS = ("tnt", "tnt-ef", "kfac", "shampoo", "adam", "sgd")

# (learning rate, damping): the paper's Table 3, and Table 6 for TNT-EF. Adam's is its epsilon.
TABLE_3: dict[str, dict[str, tuple[float, float | None]]] = {
    "mnist": {
        "tnt": (1e-4, 0.1),
        "tnt-ef": (3e-6, 0.01),
        "kfac": (0.003, 0.3),
        "shampoo": (3e-4, 3e-4),
        "adam": (1e-4, 1e-4),
        "sgd": (0.003, None),
    },
    "faces": {
        "tnt": (1e-6, 0.003),
        "tnt-ef": (3e-6, 0.01),
        "kfac": (0.1, 10.0),
        "shampoo": (3e-4, 3e-4),
        "adam": (1e-4, 1e-4),
        "sgd": (0.001, None),
    },
    # Not the paper's: the best of 35 settings a method, as means over seeds 1 to 5 and 60 epochs,
    # by `python -m experiments search digits --seeds 1,2,3,4,5 --jobs 2` (recorded at commit
    # ff3eba1 with its earlier command; 1050 runs, results/README.md has the best losses).
    "digits": {
        "tnt": (1e-4, 0.03),
        "tnt-ef": (1e-5, 0.01),
        "kfac": (0.03, 0.1),
        "shampoo": (0.01, 1e-3),
        "adam": (0.01, 1e-4),
        "sgd": (0.032, None),
    },
}
# The paper has no CURVES: MNIST's settings, for images of the same size and the same loss.
TABLE_3["curves"] = TABLE_3["mnist"]
# (learning rate, damping, mu, beta): Table 5, from the search over all four.
TABLE_5: dict[str, dict[str, tuple[float, float | None, float, float | None]]] = {
    "mnist": {
        "tnt": (1e-4, 0.1, 0.9, 0.9),
        "kfac": (3e-5, 0.01, 0.999, 0.999),
        "shampoo": (1e-4, 3e-4, 0.99, 0.99),
        "adam": (1e-4, 1e-4, 0.99, 0.99),
        "sgd": (0.001, None, 0.99, None),
    },
    "faces": {
        "tnt": (1e-6, 0.003, 0.9, 0.9),
        "kfac": (0.01, 3.0, 0.99, 0.99),
        "shampoo": (1e-4, 3e-4, 0.99, 0.999),
        "adam": (1e-4, 1e-4, 0.9, 0.9),
        "sgd": (0.001, None, 0.9, None),
    },
}


def autoencoder_settings(problem: str, optimizer: str, table: int = 3) -> Settings:
    """A method's settings: the paper's, or this project's for the digits.

    Args:
        problem: "mnist", "faces", "curves" or "digits".
        optimizer: one of `OPTIMIZERS`.
        table: 3 for the paper's search over learning rate and damping; 5 for the one over mu and
            beta, too, which has no TNT-EF.

    Raises:
        ValueError: the table has no such method or problem.
    """
    batch_size, epochs = (128, 60) if problem == "digits" else (1000, 10)
    rows: dict[str, tuple[float | None, ...]] = dict(
        (TABLE_5 if table == 5 else TABLE_3).get(problem, {})
    )
    if optimizer not in rows:
        raise ValueError(f"Table {table} on {problem} has {', '.join(rows)}, but not {optimizer}")
    lr, damping, momentum, stat_decay = (*rows[optimizer], 0.9, None)[:4]
    assert lr is not None and momentum is not None
    return method_settings(
        *(optimizer, lr, damping),
        momentum=momentum,
        stat_decay=stat_decay,
        intervals=(1, 20),  # the paper's for both its autoencoders
        batch_size=batch_size,
        epochs=epochs,
    )


def main(
    problem: Annotated[str, typer.Argument(help=f"One of {', '.join(LABELS)}.")],
    optimizer: options.Optimizers = "all",
    table: Annotated[int, typer.Option("--table", help="The paper's settings: 3 or 5.")] = 3,
    data: options.Data = None,
    examples: options.Examples = None,
    seeds: options.Seeds = "0",
    epochs: options.Epochs = None,
    changes: options.Overrides = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    out: options.Out = None,
) -> None:
    """Figures 2, 4, 6: autoencoders with the settings of Tables 3, 5 and 6."""
    if problem not in LABELS:
        raise typer.BadParameter(f"problem must be one of {', '.join(LABELS)}, got {problem!r}")
    # Two threads do not speed up matrices of 128 rows.
    where = options.set_machine(1 if threads is None and problem == "digits" else threads, device)
    known = OPTIMIZERS if table == 3 else tuple(TABLE_5["mnist"])
    with user_errors():
        loaded = load_autoencoder(problem, data, examples)
        each = [
            overridden(autoencoder_settings(problem, name, table), changes)
            for name in chosen(optimizer, known)
        ]
    # All methods for one seed before the next seed: a slow phase of the machine affects them all.
    wanted = [
        replace(settings, seed=seed, epochs=epochs or settings.epochs)
        for seed in numbers(seeds)
        for settings in each
    ]
    name = problem if table == 3 else f"{problem}-tuned"
    out = out or Path(f"results/autoencoders/{name}.json")
    run_comparison("autoencoder", loaded, wanted, out, where)
