"""Records of experiments that were never made, with the numbers that a test wants."""

import copy
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.cosine import search_keys
from experiments.costs.step_sets import STEP_SETS
from experiments.directions.followers import COMPARED
from experiments.figures.evidence import Record
from experiments.language.forms import form_settings
from experiments.problems import autoencoders as autoencoder_problems
from experiments.problems import classifiers
from experiments.runs.settings import Settings
from experiments.runs.training import Epoch, Run
from experiments.sensitivities.plan import points

SEEDS = (0, 1, 2)
NOISE = (0.0, 0.1, -0.1)
ORIGIN = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "date": "2026-01-02T03:04:05+00:00",
    "command": "python -m experiments.made_up --out x|y.json",
    "machine": {"system": "", "cpu": "a <fast> CPU", "cores": 2, "memory_gib": 8, "gpu": None},
    "versions": {"torch": "2.0"},
    "threads": {"torch": 2},
    "device": "cpu",
}


def record(experiment: str, protocol: dict[str, Any], runs: list[dict[str, Any]]) -> Record:
    content = {
        "experiment": experiment,
        "protocol": protocol,
        "runs": [{**run, "provenance": 0} for run in runs],
        "provenance": [ORIGIN],
    }
    return Record(Path(f"{experiment}.json"), json.loads(json.dumps(content)))


def training(
    settings: Settings,
    loss: float,
    seconds: float = 1.0,
    steps: int = 600,
    metrics: dict[str, float] | None = None,
    problem: str = "mnist",
) -> dict[str, Any]:
    """The record of a run that has the loss from its first step on."""
    epochs = [
        Epoch(number, loss, seconds, number * seconds, metrics or {})
        for number in range(1, settings.epochs + 1)
    ]
    run = Run(problem, settings, {}, steps // settings.epochs, None, None, [loss] * steps, epochs)
    if math.isinf(loss):
        run.diverged_at_step = steps
    made = json.loads(json.dumps(run.record()).replace("Infinity", "null"))
    return {"key": asdict(settings), **made}


def autoencoders(
    losses: dict[str, float],
    problem: str = "mnist",
    seconds: dict[str, float] | None = None,
    seeds: tuple[int, ...] = SEEDS,
    steps: int = 600,
    table: int = 3,
    **changes: Any,
) -> Record:
    """Runs with the paper's settings, but for the changes."""
    runs = []
    for optimizer, loss in losses.items():
        for seed in seeds:
            settings = autoencoder_problems.default_settings(problem, optimizer, table)
            settings = replace(settings, epochs=2, seed=seed, **changes)
            own = (seconds or {}).get(optimizer, 1.0) + NOISE[seed % 3]
            loss_ = loss + NOISE[seed % 3]
            runs.append(training(settings, loss_, own, steps, problem=problem))
    return record("autoencoder", {"problem": problem, "examples": 60000}, runs)


def networks(
    errors: dict[str, float], problem: str = "resnet32", images: int = 50_000, **seconds: float
) -> Record:
    runs = []
    for optimizer, error in errors.items():
        for seed in SEEDS:
            settings = replace(classifiers.default_settings(problem, optimizer), seed=seed)
            metrics = {"validation_error": error + NOISE[seed] / 100}
            each = seconds.get(optimizer.replace("-", "_"), 1.0)
            steps = 6 * settings.epochs
            runs.append(training(settings, 1.0 + error, each, steps, metrics, problem))
    return record("cnn", {"examples": images}, runs)


def cosines(similarity: dict[str, float], iterations: int = 100) -> Record:
    runs: list[dict[str, Any]] = [
        {"key": key, "smoothed_loss": 1.0, "seconds": 1.0} for key in search_keys()
    ]
    for seed in SEEDS:
        values = {
            name: {
                "none" if damping is None else f"{damping:g}": [
                    [similarity.get(name, 0.5) + NOISE[seed] / 100] * iterations for _ in range(4)
                ]
                for damping in method.dampings
            }
            for name, method in COMPARED.items()
        }
        runs.append({"key": {"part": "similarity", "seed": seed}, "similarity": values})
    return record("cosine", {"iterations": iterations}, runs)


def idealized(average: float, spread: float = 0.0) -> Record:
    constants = {
        "lipschitz": 1.0,
        "lowest": 0.0,
        "first": 1.0,
        "noise": 0.1,
        "batch_size": 10,
        "kappa_low": 1.0,
        "kappa_high": 1.0,
    }
    protocol = {"constants": constants, "recorded_at": [1, 10]}
    runs = [
        {
            "key": {"beta": 0.75, "multiple": 1.0, "seed": seed},
            "averages": [average + spread * NOISE[seed]] * 2,
            "losses": [1.0, 1.0],
            "largest_loss": 1.0,
        }
        for seed in SEEDS
    ]
    return record("idealized", protocol, runs)


def steps(
    ratios: dict[tuple[str, str], float], spread: float = 0.01, busy: float | None = 0.0
) -> Record:
    runs = []
    for (name, method), ratio in ratios.items():
        pair = STEP_SETS[name].intervals
        key = {"set": name, "method": method, "stat_interval": pair[0], "inverse_interval": pair[1]}
        runs.append(
            {
                "key": key,
                "seconds": ratio,
                "sgd_seconds": 1.0,
                "ratio": ratio,
                "quartiles": [ratio - spread, ratio + spread],
                "busy_before": busy,
                "busy_after": None,
            }
        )
    return record("step times", {"quick": True}, runs)


def complexity(fitted: float | None, of: str = "time", equal: bool = True) -> Record:
    run = {
        "key": {"of": of, "method": "TNT", "over": "d", "part": "k = 2"},
        "term": "sum d^2",
        "predicted": 2.0,
        "fitted": fitted,
        "fitted_values": [1, 2, 4],
        "values": [1, 2, 4],
        "equal": equal,
        "busy_before": 0.0,
        "busy_after": 0.0,
    }
    return record("complexity of whole methods", {"quick": False}, [run])


def language(
    tnt: float, others: float = 2.0, length: int = 400, at_an_end: str | None = None
) -> Record:
    """Final runs and searches; the best rate of the form `at_an_end` is the highest tried."""
    runs: list[dict[str, Any]] = []
    for form, loss in (("tnt-grafted", tnt), ("adam", others), ("muon", others)):
        for seed in SEEDS:
            settings = form_settings(form, length // 50, seed)
            key = {"width": 64, "steps": length, "form": form, "intervals": [5, 20]}
            noise = NOISE[seed] / 10 * (1 if form == "adam" else 1.5)
            runs.append(
                {
                    "key": {"stage": "final", **key, "settings": asdict(settings)},
                    "validation_losses": [3.0, loss + noise],
                    "steps_per_epoch": 50,
                    "diverged_at_step": None,
                }
            )
        for factor in (0.5, 1.0) if form == at_an_end else (0.5, 1.0, 2.0):
            tried = replace(settings, lr=factor * settings.lr, seed=100)
            runs.append(
                {
                    "key": {"stage": "tuning", **key, "settings": asdict(tried)},
                    "validation_losses": [3.0, loss + abs(factor - 1)],
                    "steps_per_epoch": 50,
                    "diverged_at_step": None,
                }
            )
    return record("transformer table", {"lengths": [length]}, runs)


def search(tnt: float, others: float = 20.0) -> Record:
    runs = []
    for optimizer, loss in (("tnt", tnt), ("sgd", others), ("adam", others)):
        for seed in SEEDS:
            settings = autoencoder_problems.autoencoder_settings("digits", optimizer, 0.1, 0.1)
            settings = replace(settings, seed=seed)
            own = {"final_smoothed_loss": loss + NOISE[seed], "diverged_at_step": None}
            runs.append({"key": asdict(settings), **own})
            for lr in (0.05, 0.2):
                worse = replace(settings, lr=lr)
                lost = {"final_smoothed_loss": None, "diverged_at_step": 3}
                runs.append({"key": asdict(worse), **lost})
    return record("search", {"problem": "digits"}, runs)


def sensitivity(grafted: float, paper: float) -> Record:
    """At the base point the lower of two rates is best, elsewhere it has these regrets."""
    runs = []
    for form, regret in (("tnt-grafted", grafted), ("tnt", paper)):
        for number, point in enumerate(points("digits")):
            for seed in SEEDS:
                best = 1.0 + NOISE[seed] / 100
                key = {"form": form, **asdict(point), "seed": seed}
                low = best if not number else best + regret * (1 + NOISE[seed])
                losses = {0.1: low, 1.0: best if number else best + 1}
                for lr, loss in losses.items():
                    known = loss if math.isfinite(loss) else None
                    runs.append({"key": {**key, "lr": lr}, "loss": known, "diverged_at_step": None})
    protocol = {"problems": {"digits": {"loss_floor": None}}}
    return record("sensitivity", protocol, runs)


ALL = ("tnt", "tnt-ef", "kfac", "shampoo", "adam", "sgd")


def losses(tnt: float) -> dict[str, float]:
    return {name: tnt if name == "tnt" else 10.0 for name in ALL}


def noisy(tnt: float) -> Record:
    """TNT's mean differs, but its seeds do so by more."""
    made = copy.deepcopy(dict(autoencoders(losses(10.0)).content))
    for run in made["runs"]:
        if run["key"]["optimizer"] == "tnt":
            run["final_smoothed_loss"] = tnt
            shifted = tnt + 5 * (run["key"]["seed"] - 1)
            for epoch in run["epochs"]:
                epoch["smoothed_loss"] = shifted
    return Record(Path("noisy.json"), made)


def tuned(tnt: float, kfac: float, steps: int = 6000) -> Record:
    """With Table 5's settings, of which KFAC's momentum and decay are 0.999."""
    known = {"tnt": tnt, "kfac": kfac, "shampoo": tnt, "adam": 10.0, "sgd": 10.0}
    return autoencoders(known, steps=steps, table=5)


ERRORS = {"tnt": 0.07, "tnt-ef": 0.07, "kfac-eigen": 0.07, "shampoo": 0.07, "adam": 0.07}
FULL = {**ERRORS, "sgd": 0.07}
TIMES = {
    ("mnist_ae", "tnt"): 2.0,
    ("mnist_ae", "kfac"): 3.0,
    ("faces_ae", "tnt"): 2.0,
    ("faces_ae", "kfac"): 2.5,
}
VGG = {("vgg16", "tnt"): 1.2, ("vgg16", "shampoo"): 1.3, ("vgg16", "kfac-eigen"): 4.0}
