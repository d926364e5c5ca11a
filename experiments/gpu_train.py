"""A whole training on a GPU: a character transformer, equal seconds for every method.

Width 512, 6 layers, 19 million parameters, bfloat16 autocast, on the sources of Python's standard
library; every method without torch.compile, then with it. The learning rate follows the share of
the seconds that have passed. A number of steps measured beforehand would end TNT's runs early: its
first steps are its slowest.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch._functorch.config as functorch_config
import typer
from matplotlib import pyplot
from torch import Tensor

from experiments import options
from experiments.methods import METHODS, Settings, build_optimizer, lr_multiplier, observes
from experiments.models import seeded
from experiments.options import Quick, chosen, overridden, user_errors
from experiments.plots import loss_axis, plain_axes, save
from experiments.problems.language import Language, load_language
from experiments.tasks import modern_settings
from tnt_kernels.benchmark.clock import now
from tnt_kernels.benchmark.provenance import provenance
from tnt_kernels.benchmark.records import check_writable, write_json
from tnt_kernels.benchmark.tables import table

QUICK = [Quick("gpu_train", "--device cpu --quick --seconds 0.2 --threads 1")]

SIZES: dict[str, Any] = {"width": 512, "layers": 6, "heads": 8, "context": 256}
SMALL: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "context": 32}
VALIDATION_WINDOWS, BATCH_SIZE = 1024, 64
# The rivals' rates: the best at width 128 on the same text (0.0056, 0.0056 and 0.01; searched on a
# CPU, task python128-1000 of experiments/results/defaults.json), times 128 / 512, since best rates
# fall with the width (experiments/results/rivals.md). Nothing was searched at width 512. TNT has
# its default, though at this width a lower rate is better (docs/settings.md).
RATES = {"tnt-ef": None, "tnt": None, "adam": 0.0014, "muon": 0.0014, "soap": 0.0025}
POINTS = 100  # of a curve; only there a run waits for the device
# Uncounted steps at a five-hundredth of the rate: they compile, and make the first factors of TNT
# and the first two bases of SOAP.
WARM_UP_STEPS = 12
REHEARSAL = 2.0  # seconds of TNT, thrown away: Triton compiles a kernel when it first runs
# Uncounted seconds of a run, by whether it is compiled: an estimate, so that all runs fit.
ASIDE = {False: 5.0, True: 16.0}
VARIANTS = typer.Option(
    *("--optimizer",), metavar="NAME[/lr=VALUE],…", help="tnt-ef/lr=0.003: with another rate."
)


def main(
    optimizer: Annotated[str, VARIANTS] = "all",
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="A run; at most.")] = 20.0,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds of all runs.")] = 255.0,
    device: options.Device = "cuda",
    quick: options.QuickRun = False,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Train a transformer on a GPU for some seconds with each method, compiled and not."""
    end = time.monotonic() + limit
    where = options.set_machine(threads, device)
    out = out or Path("results/gpu_train.json")
    wanted = [
        overridden(modern_settings(name, 1, RATES[name], BATCH_SIZE), changes)
        for one, *changes in (part.split("/") for part in optimizer.split(","))
        for name in chosen(one, list(RATES))
    ]
    with user_errors():
        check_writable(out)
        sizes = {**(SMALL if quick else SIZES), "validation_windows": VALIDATION_WINDOWS}
        problem = load_language(corpus="python", **sizes).to(where)
    record = make(Shared(problem, where, end), wanted, seconds, out)
    draw(record, out.with_suffix(".png"))
    print(page(record))
    failed = [label(run) for run in record["runs"] if "error" in run]
    print(f"wrote {out}, its page and its picture; failed: {', '.join(failed) or 'none'}")
    if failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Shared:
    """What all runs share: a problem, its device, and their end on `time.monotonic`'s clock."""

    problem: Language
    device: torch.device
    end: float

    def check_time(self, seconds: float) -> None:
        """Raise TimeoutError unless so many seconds are left."""
        left = self.end - time.monotonic()
        if left < seconds:
            raise TimeoutError(f"{left:.0f} s of --limit were left, {seconds:.0f} s needed")


def make(shared: Shared, wanted: Sequence[Settings], seconds: float, out: Path) -> dict[str, Any]:
    """Train with each of the settings, not compiled and then compiled; return the record.

    Record and page are written after every run. A method that fails, or for which no time is left,
    is recorded with its error, and the others go on. If not all runs fit, they have fewer seconds:
    those that are compiled all as many, and so the others.
    """
    cuda = shared.device.type == "cuda"
    protocol = {
        **shared.problem.description(),
        "parameters": sum(p.numel() for p in shared.problem.build().parameters()),
        "batch_size": BATCH_SIZE,
        "warm_up_steps": WARM_UP_STEPS,
        "autocast": "bfloat16",
        "float32_products": "TF32" if cuda else "float32",
    }
    runs: list[dict[str, Any]] = []
    record = {"protocol": protocol, "provenance": provenance(shared.device), "runs": runs}
    if cuda:
        torch.set_float32_matmul_precision("high")
        for settings in wanted:
            if settings.optimizer in ("tnt", "tnt-ef"):
                attempt(shared, settings, REHEARSAL, False)
    for compiled in (False, True):
        aside = sum(ASIDE[half] for half in ASIDE if half >= compiled)
        left = (shared.end - time.monotonic()) / len(wanted) - aside
        fitting = min(seconds, max(1.0, left if compiled else left / 2))
        for settings in wanted:
            runs.append(attempt(shared, settings, fitting, compiled))
            write_json(out, record, digits=6)
            out.with_suffix(".md").write_text(page(record), encoding="utf-8")
            print(label(runs[-1]), runs[-1].get("error", "done"), flush=True)
    return record


def attempt(shared: Shared, settings: Settings, seconds: float, compiled: bool) -> dict[str, Any]:
    """`train`, with the settings, and with the error of a method that fails."""
    run: dict[str, Any] = {"settings": asdict(settings), "compiled": compiled, "seconds": seconds}
    # The statistics of sampled labels take a second backward pass.
    kept = functorch_config.patch(donated_buffer=False) if observes(settings) else nullcontext()
    try:
        with kept:
            return run | train(shared, settings, seconds, compiled)
    except Exception as error:
        return run | {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def train(shared: Shared, settings: Settings, seconds: float, compiled: bool) -> dict[str, Any]:
    """Train for some seconds after the warm-up; the run's numbers and its curve.

    Each point of the curve is the mean loss of the steps since the point before. A loss that is not
    finite ends the run.

    Raises:
        TimeoutError: so many seconds are not left.
    """
    problem, device = shared.problem, shared.device
    if compiled:
        torch.compiler.reset()  # it keeps the models of earlier runs
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    shared.check_time(seconds)
    began = now(device)
    model = seeded(problem.build, settings.seed).to(device)
    optimizer: Any = build_optimizer(model, settings, problem.likelihood)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    forward: Any = torch.compile(model, backend=backend) if compiled else model
    places = torch.Generator(device).manual_seed(settings.seed)

    def step(share: float) -> Tensor:
        rate = settings.lr * lr_multiplier(settings.schedule, int(1e4 * share), 1, 10_000)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(problem.examples, (BATCH_SIZE,), generator=places, device=device)
        inputs, targets = problem.batch(starts, places)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            outputs = problem.outputs(forward, inputs)
        loss = problem.loss(outputs.float(), targets)
        if observes(settings):
            optimizer.observe(outputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(WARM_UP_STEPS):
        step(0.0)
    start = now(device)
    shared.check_time(seconds)
    curve: dict[str, list[float]] = {"steps": [], "seconds": [], "loss": []}
    losses: list[Tensor] = []
    steps, elapsed = 0, 0.0
    while elapsed < seconds:
        losses.append(step(elapsed / seconds))
        steps += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds * (len(curve["loss"]) + 1) / POINTS:
            loss = torch.stack(losses).mean().item()  # waits for the device
            elapsed, losses = time.perf_counter() - start, []
            for values, value in zip(curve.values(), (steps, elapsed, loss), strict=True):
                values.append(value)
            if not math.isfinite(loss):
                break
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    return {
        "warm_up_seconds": start - began,
        "steps": steps,
        "steps_per_second": steps / elapsed,
        "training_loss": curve["loss"][-1],
        **problem.evaluate(model),  # in float32, not compiled
        "peak_memory_gb": memory,
        "curve": curve,
    }


def label(run: Mapping[str, Any]) -> str:
    """The method, its rate, and whether it was compiled."""
    own = run["settings"]
    name = "AdamW" if own["optimizer"] == "adam" else METHODS[own["optimizer"]].label
    return f"{name}, {own['lr']:g}{', compiled' if run['compiled'] else ''}"


def page(record: Mapping[str, Any]) -> str:
    """What was run, and a table of the runs."""
    protocol, origin = record["protocol"], record["provenance"]
    names = ("seconds", "warm_up_seconds", "steps", "steps_per_second", "training_loss")
    columns = [*names, "validation_loss", "peak_memory_gb"]
    lines = []
    for run in record["runs"]:
        cells = ["" if run.get(name) is None else f"{run[name]:.5g}" for name in columns]
        lines.append([label(run), *cells, run.get("error", "").replace("|", "/")])
    machine = origin["machine"]
    text = (
        f"A transformer of width {protocol['width']} with {protocol['layers']} layers, "
        f"{protocol['parameters']:,} parameters, on the {protocol['source']}; batches of "
        f"{BATCH_SIZE} × {protocol['context']} characters. {machine['gpu'] or machine['cpu']}, "
        f"torch {origin['versions']['torch']}, commit {origin['commit']}; autocast to bfloat16, "
        f"other products in {protocol['float32_products']}. {WARM_UP_STEPS} warm-up steps are not "
        "in the seconds. The training loss is the mean over their last hundredth; losses are in "
        "nats per character. One seed."
    )
    header = ["method, rate", *(name.replace("_", " ") for name in columns), "error"]
    return "\n".join(["# Whole trainings", "", text, "", *table(header, lines)])


def draw(record: Mapping[str, Any], path: Path) -> None:
    """The training losses against the seconds, not compiled on the left, compiled on the right."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for run in record["runs"]:
        if "error" not in run:
            axes, colour = (
                panels[int(run["compiled"])],
                METHODS[run["settings"]["optimizer"]].colour,
            )
            curve = run["curve"]
            axes.plot(curve["seconds"], curve["loss"], color=colour, label=label(run))
    for axes in panels:
        loss_axis(axes)
        plain_axes(axes)
        axes.set_xlabel("seconds after the warm-up")
        if axes.lines:
            axes.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("training loss [nats per character]")
    protocol, machine = record["protocol"], record["provenance"]["machine"]
    title = f"Character transformer, width {protocol['width']}, {protocol['layers']} layers"
    save(figure, path, f"{title}, {machine['gpu'] or 'on a CPU'}")
