"""Process time: seconds of whole training steps of every method, in multiples of SGD-m's.

Random data of the right shape. Each kind of step (plain, with statistics, with statistics and
inverses) is timed by itself; the mean step at (T1, T2) is the sum of the kinds' medians, weighted
by their shares of a period.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from experiments import options
from experiments.methods import (
    METHODS,
    build_optimizer,
    has_statistics,
    hidden_matrices,
    method_settings,
    observes,
)
from experiments.models import seeded
from experiments.models.autoencoder import (
    FACES_WIDTHS,
    MNIST_WIDTHS,
    autoencoder,
    reconstruction_loss,
    squared_error,
)
from experiments.models.resnet import resnet32
from experiments.models.transformer import CharacterTransformer
from experiments.models.vgg import vgg16
from experiments.options import Quick, chosen, user_errors
from experiments.run_files import RunFile
from experiments.steps import (
    PLAIN,
    STATISTICS,
    Kind,
    TrainingStep,
    amortised,
    components,
    shares,
    time_kinds,
)
from tnt_kernels.benchmark.clock import busy_share, summary
from tnt_kernels.benchmark.tables import disturbance, megabytes, milliseconds, table
from tools.measuring.state import state_bytes

QUICK = [Quick("step-times", "--quick")]

# The paper's (T1, T2) for its autoencoders and for its convolutional networks.
INTERVALS = ((1, 20), (10, 100))
FULL, SMALL = (60.0, 3, 20), (8.0, 2, 5)  # seconds of a set, fewest rounds, most rounds
_CHARACTERS = 65  # in tiny Shakespeare

# (learning rate, damping): small steps that stay finite. The time of a step depends on them only by
# the number of Newton's iterations, so Shampoo has the damping of the paper's autoencoders.
RATES: dict[str, tuple[float, float | None]] = {
    "sgd": (1e-3, None),
    "adam": (1e-4, 1e-4),
    "tnt": (1e-5, 0.1),
    "tnt-ef": (1e-5, 0.1),
    "kfac": (1e-3, 0.3),
    "kfac-eigen": (1e-3, 0.3),
    "shampoo": (1e-4, 3e-4),
    "muon": (1e-4, None),
}
Examples = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepSet:
    """A model and its batch, and what the methods need to know of them."""

    build: Callable[[], nn.Module]
    examples: Examples  # draws the inputs and targets of a batch
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor]
    likelihood: str
    kfac: str  # the form of KFAC; on the paper's problems the paper's
    note: str = ""  # differences from a real training
    # Methods one of whose refreshes takes over 25 s on two cores, by an estimate.
    left_out: tuple[str, ...] = ()

    def methods(self) -> list[str]:
        """The compared methods; Muon only if the model has a matrix in a hidden layer."""
        with torch.device("meta"):
            muon = ["muon"] if hidden_matrices(self.build()) else []
        found = ["sgd", "adam", *muon, "tnt", "tnt-ef", self.kfac, "shampoo"]
        return [method for method in found if method not in self.left_out]

    def training_step(self, method: str, device: torch.device) -> TrainingStep:
        """A method's training step; all methods have the same model and batch."""
        model = seeded(self.build, 0).to(device)
        if self.kfac == "kfac-eigen" and device.type == "cpu":
            # As the experiments train convolutional networks.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs, targets = self.examples(self.batch_size, torch.Generator().manual_seed(0))
        settings = method_settings(
            *(method, *RATES[method]), warm_start=False, batch_size=self.batch_size, epochs=1
        )
        return TrainingStep(
            model=model,
            optimizer=build_optimizer(model, settings, self.likelihood),
            inputs=inputs.to(device),
            targets=targets.to(device),
            loss=self.loss,
            observes=observes(settings),
        )


def _pixels(pixels: int) -> Examples:
    return lambda count, rng: (torch.rand(count, pixels, generator=rng),) * 2


def _images(classes: int) -> Examples:
    return lambda count, rng: (
        torch.randn(count, 3, 32, 32, generator=rng),
        torch.randint(classes, (count,), generator=rng),
    )


def _text(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(_CHARACTERS, (count, 65), generator=rng)
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


_BERNOULLI = (reconstruction_loss, "bernoulli", "kfac")
_GAUSSIAN = (squared_error, "gaussian", "kfac")
_CONVNET = (functional.cross_entropy, "categorical", "kfac-eigen")
_LANGUAGE = (functional.cross_entropy, "categorical", "kfac")
STEP_SETS = {
    "mnist_ae": StepSet(lambda: autoencoder(MNIST_WIDTHS), _pixels(784), 1000, *_BERNOULLI),
    "faces_ae": StepSet(lambda: autoencoder(FACES_WIDTHS), _pixels(625), 1000, *_GAUSSIAN),
    "resnet32": StepSet(resnet32, _images(10), 128, *_CONVNET),
    "vgg16": StepSet(
        *(vgg16, _images(100), 32, *_CONVNET, "batches of 32, not the paper's 128"),
        left_out=("kfac-eigen", "shampoo"),
    ),
    "gpt2": StepSet(
        lambda: CharacterTransformer(_CHARACTERS, width=768, layers=2, heads=12, context=64),
        *(_text, 8, *_LANGUAGE),
        "GPT-2's width, 2 of its 12 blocks, 65 characters instead of 50257 tokens, no biases; 8 "
        "sequences of 64",
        left_out=("shampoo",),
    ),
    "square4096": StepSet(
        lambda: nn.Sequential(nn.Linear(4096, 4096, bias=False)),
        *(_pixels(4096), 256, *_GAUSSIAN),
        "one layer without a bias; batches of 256",
        left_out=("shampoo",),
    ),
    "characters": StepSet(
        lambda: CharacterTransformer(_CHARACTERS, width=128, layers=2, heads=4, context=64),
        *(_text, 32, *_LANGUAGE),
        "a transformer of width 128 with 2 blocks; 32 sequences of 64 characters",
    ),
}
QUICK_SETS = ("mnist_ae", "resnet32")


def main(
    sets: Annotated[str, typer.Option("--sets", metavar="NAME,…")] = "",
    optimizer: options.Optimizers = "all",
    quick: options.QuickRun = False,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    out: options.Out = None,
) -> None:
    """Process time: seconds of whole training steps of every method, next to SGD-m's."""
    where = options.set_machine(threads, device)
    names = chosen(sets, list(STEP_SETS)) if sets else list(QUICK_SETS if quick else STEP_SETS)
    methods = chosen(optimizer, list(METHODS))
    if not {m for name in names for m in STEP_SETS[name].methods()}.intersection(methods):
        raise typer.BadParameter(f"{', '.join(names)}: no set has one of {', '.join(methods)}")
    out = out or Path("results/step_times.json")
    protocol = {"quick": quick, "threads": torch.get_num_threads()}
    with user_errors():
        file = RunFile(out, "step times", protocol, where)
        file.check_same_machine()
    for name in tqdm(names, "step times", unit="set", disable=None):
        allowed = [method for method in STEP_SETS[name].methods() if method in methods]
        measure_set(file, name, allowed, where, *(SMALL if quick else FULL))
    text = page(file.runs)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwrote {out} and {out.with_suffix('.md')}")


def measure_set(
    file: RunFile,
    name: str,
    methods: Sequence[str],
    device: torch.device,
    seconds: float,
    min_rounds: int,
    max_rounds: int,
) -> None:
    """Add the runs of a set that the file lacks: one for each method and pair of intervals.

    SGD-m alternates with them, and every ratio is to this SGD-m. `seconds` are for all rounds.
    """
    step_set = STEP_SETS[name]
    missing = [m for m in methods if any(file.find(key) is None for key in keys(name, m))]
    if not missing:
        return
    steps: dict[str, TrainingStep] = {}
    for method in dict.fromkeys(["sgd", *missing]):
        steps[method] = step_set.training_step(method, device)
        steps[method]()  # the first step makes the state, the statistics and the inverses
    busy_before = busy_share()
    kinds = dict.fromkeys([PLAIN, STATISTICS, *(k for pair in INTERVALS for k in shares(*pair))])
    samples = time_kinds(steps, list(kinds), seconds, min_rounds, max_rounds)
    times = {m: {kind: summary(s) for kind, s in own.items()} for m, own in samples.items()}
    sgd = times["sgd"][PLAIN]["median"]
    shared = {
        "batch_size": step_set.batch_size,
        "note": step_set.note,
        "parameter_bytes": sum(p.nbytes for p in steps["sgd"].model.parameters()),
        "busy_before": busy_before,
        "busy_after": busy_share(),
    }
    for method in missing:
        for key in keys(name, method):
            result = mean_step(times[method], key, sgd)
            size = {"state_bytes": state_bytes(steps[method].optimizer)}
            file.add(key, {**shared, **result, **size})


def keys(name: str, method: str) -> list[dict[str, Any]]:
    """The keys of a method's runs on a set; a first-order method has one, without T1 and T2."""
    pairs = INTERVALS if has_statistics(method) else ((None, None),)
    return [
        {"set": name, "method": method, "stat_interval": t1, "inverse_interval": t2}
        for t1, t2 in pairs
    ]


def mean_step(
    times: Mapping[Kind, Mapping[str, Any]], key: Mapping[str, Any], sgd: float
) -> dict[str, Any]:
    """The mean step of a period, from the `summary` of every kind and the time of SGD-m's step.

    Returns:
        Seconds and quartiles (the kinds' quartiles, with the same weights), the ratio to SGD-m, the
        parts of the mean, and each kind's times.
    """
    t1, t2 = key["stat_interval"], key["inverse_interval"]
    parts = shares(t1, t2) if t1 else {PLAIN: Fraction(1)}
    medians = {kind: known["median"] for kind, known in times.items()}
    ends = [{kind: known["quartiles"][end] for kind, known in times.items()} for end in (0, 1)]
    seconds = amortised(medians, parts)
    return {
        "seconds": seconds,
        "quartiles": [amortised(end, parts) for end in ends],
        "ratio": seconds / sgd,
        "components": components(medians, parts),
        "kinds": {kind.label: known for kind, known in times.items()},
    }


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """All runs as Markdown tables, one a set."""
    lines = [
        "# Seconds per training step",
        "",
        "Whole steps: zero_grad, forward, loss, observe, backward, step. Medians; quartiles in "
        "brackets. Methods whose refresh takes over 25 s, by an estimate, are left out.",
        "",
    ]
    for name in dict.fromkeys(run["key"]["set"] for run in runs):
        own = [run for run in runs if run["key"]["set"] == name]
        note = f"; {own[0]['note']}" if own[0]["note"] else ""
        size = megabytes(own[0]["parameter_bytes"])
        lines += [f"## {name}", ""]
        lines += [f"Batches of {own[0]['batch_size']}, {size} MB of parameters{note}."]
        lines += [disturbance(own[0]), ""]
        header = ["", "T1, T2", "mean step, ms", "over SGD-m", "plain step"]
        header += ["+ statistics", "+ inverses", "state, MB"]
        lines += table(header, [_row(run) for run in own])
    return "\n".join(lines)


def _row(run: Mapping[str, Any]) -> list[str]:
    key = run["key"]
    first_order = key["stat_interval"] is None
    low, high = (milliseconds(end) for end in run["quartiles"])
    return [
        METHODS[key["method"]].label,
        "" if first_order else f"{key['stat_interval']}, {key['inverse_interval']}",
        f"{milliseconds(run['seconds'])} ({low} to {high})",
        f"{run['ratio']:.2f}",
        *(milliseconds(run["components"][part]) for part in ("plain", "statistics", "inverses")),
        megabytes(run["state_bytes"]),
    ]
