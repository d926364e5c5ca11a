"""Beyond the paper: optimizers without any argument against tuned rivals.

TNT, TNT-EF, Shampoo and KFAC have their defaults on every task: nothing is searched here. Every
rival has its best learning rate: a search with a seed that the final runs do not use goes on until
both neighbours in the grid are worse. Last, each kind of step is timed alone, all methods in turn,
since the runs share the machine.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import torch
import typer
from scipy import stats

from experiments import options
from experiments.methods import METHODS, Settings, build_optimizer, lr_multiplier, variant
from experiments.models import seeded
from experiments.options import Quick, chosen, user_errors
from experiments.plots import Curve, plot_curves
from experiments.pool import make_runs
from experiments.problems.autoencoders import load_autoencoder
from experiments.problems.classifiers import load_classifier
from experiments.problems.finetuning import load_finetuning
from experiments.problems.language import Recurrent, load_language
from experiments.problems.poisson import Poisson
from experiments.problems.problem import Problem
from experiments.problems.words import load_words
from experiments.run_files import RunFile, load_runs
from experiments.search import ranked
from experiments.steps import PLAIN, Kind, problem_step, time_kinds
from experiments.tasks import BATCH_SIZE, RIVALS, SCHEDULE, UNTUNED, modern_settings
from tnt_kernels.benchmark.clock import summary
from tnt_kernels.benchmark.tables import table
from tnt_optim.schedule import is_due

QUICK = [Quick("defaults", "--quick --threads 1 --jobs 2", needs_data=True)]

# The two forms of TNT: with sampled labels, and with the training gradients.
FORMS = ("tnt", "tnt-ef")
# Not a seed of the final runs: a rate must not win by the luck of a start.
TUNING_SEED = 100
# A search that goes on for longer has gone wrong: each round may change a rate by 10^(1/4).
MOST_ROUNDS = 20


@dataclass(frozen=True)
class Task:
    """A problem, the length of its runs, and where the search for the rivals' rates is.

    Attributes:
        label: in tables.
        load: the problem, from the folder of the data.
        epochs: of a run.
        centres: the learning rate of each rival with which its search begins.
        seeds: of the final runs.
        batch_size: of a step.
        metric: of an epoch, minimised; None for the smoothed training loss.
        after: a shorter task of the same problem. Its times of a step serve both; its best rates
            begin the searches.
        names_source: whether the record names the text, which differs between machines.
        untuned: the optimizers of tnt_optim.
        begin: settings to begin with on such a problem, other than the defaults; TNT's two forms
            run with both. Chosen with the seed 0, or on the tasks of drop_in_probes.json.
    """

    label: str
    load: Callable[[Path | None], Problem]
    epochs: int
    centres: Mapping[str, float]
    seeds: Sequence[int]
    batch_size: int = BATCH_SIZE
    metric: str | None = "validation_loss"
    after: str | None = None
    names_source: bool = False
    untuned: Sequence[str] = UNTUNED
    begin: Mapping[str, Any] = field(default_factory=dict)


def rate(place: int) -> float:
    """The learning rate at a place of the grid, to two significant digits.

    >>> [rate(place) for place in range(-8, -3)]
    [0.01, 0.018, 0.032, 0.056, 0.1]
    """
    return float(f"{10 ** (place / 4):.1e}")


def around(lr: float) -> list[float]:
    """A rate of the grid and its two neighbours.

    >>> around(0.01)
    [0.0056, 0.01, 0.018]
    """
    place = round(4 * math.log10(lr))
    return [rate(place + number) for number in (-1, 0, 1)]


def _words(data: Path | None) -> Problem:
    return load_words()


def _poisson(data: Path | None) -> Problem:
    return Poisson()


# The defaults were chosen with the seeds 0 to 4.
_FIVE, _THREE = range(10, 15), range(10, 13)
# The methods of README's picture.
GOALS = ("AdamW", "Muon")  # their last losses are marked in pictures
NAMES = {
    "adam": "AdamW",
    "muon": "Muon",
    "tnt": "TNT(params, likelihood=…)",
    "tnt-ef": "TNT(params)",
}
DRAWN = ("tnt", "tnt-ef", "adam", "muon", "soap")
_WITH_EF = (*UNTUNED, "kfac-ef")  # KFAC without a likelihood, where it was compared
_LANGUAGE = {method: own["lr"] or 0.0 for method, own in RIVALS.items()}
_CIFAR: dict[str, Any] = {"epochs": 5, "batch_size": 64, "seeds": _THREE}
TASKS: Mapping[str, Task] = {
    **{
        f"transformer{width}-{steps}": Task(
            f"transformer, width {width}, {steps} steps",
            functools.partial(load_language, width=width),
            steps // 50,
            _LANGUAGE,
            seeds=_FIVE,
            after=f"transformer{width}-400" if steps > 400 else None,
            untuned=_WITH_EF if (width, steps) == (128, 400) else UNTUNED,
        )
        for width in (64, 128)
        for steps in (400, 1000)
    },
    "transformer256-3000": Task(
        "transformer, width 256, 4 layers, 3000 steps",
        functools.partial(load_language, width=256, layers=4),
        60,
        # Near the best rates, which fall with the width and with the number of steps.
        {
            "adam": 1e-3,
            "muon": 3.2e-3,
            "soap": 5.6e-4,
            "normuon": 5.6e-3,
            "kl-shampoo": 1.8e-3,
            "psgd": 5.6e-4,
        },
        seeds=range(2),
    ),
    "python128-1000": Task(
        "transformer on Python sources, width 128, 2 layers, 1000 steps",
        functools.partial(load_language, corpus="python", width=128, layers=2),
        20,
        {method: lr for method, lr in _LANGUAGE.items() if method != "psgd"},
        seeds=_THREE,
        names_source=True,
    ),
    "python256-3000": Task(
        "transformer on Python sources, width 256, 4 layers, 3000 steps",
        functools.partial(load_language, corpus="python", width=256, layers=4),
        60,
        # A run takes half an hour: three rivals. Their searches begin near the best rates so far.
        {"adam": 1.8e-3, "muon": 5.6e-3, "soap": 1.8e-3},
        seeds=range(20, 22),  # with 10 to 12 interval_warmup was chosen
        names_source=True,
        untuned=FORMS,
        begin={"lr": 0.0056},
    ),
    "gru": Task(
        "GRU",
        functools.partial(load_language, kind=Recurrent),
        8,
        {m: lr for m, lr in _LANGUAGE.items() if m in DRAWN},
        seeds=_THREE,
        begin={"lr": 0.018},
    ),
    "vit": Task(
        "vision transformer",
        functools.partial(load_classifier, "vit", examples=5120, validation=1000),
        centres={"adam": 3.2e-3, "muon": 1e-2, "soap": 5.6e-3},
        untuned=_WITH_EF,
        **_CIFAR,
    ),
    "resnet8": Task(
        "ResNet-8, batch norm",
        functools.partial(load_classifier, "resnet8", examples=5120, validation=1000),
        centres={"adam": 1e-2, "soap": 1e-2},  # Muon takes matrices only
        begin={"lr": 0.018},
        **_CIFAR,
    ),
    "mnist": Task(
        "MNIST autoencoder",
        functools.partial(load_autoencoder, "mnist"),
        5,
        {"adam": 1e-2, "muon": 5.6e-3, "soap": 5.6e-3},
        batch_size=1000,
        seeds=_THREE,
        metric=None,
    ),
    **{
        f"finetune-{kind}": Task(
            f"fine-tuning, {label}, 300 steps",
            functools.partial(load_finetuning, low_rank=kind == "lora"),
            6,
            centres,
            seeds=_THREE,
            untuned=FORMS,
            names_source=True,
        )
        for kind, label, centres in (
            ("all", "all weights", {"adam": 3.2e-3, "soap": 3.2e-3}),
            ("lora", "low-rank updates", {"adam": 1e-2, "soap": 1e-2}),
        )
    },
    "words": Task(
        "bag of words",
        _words,
        10,
        {"adam": 5.6e-2, "soap": 3.2e-2},
        seeds=_THREE,
        batch_size=512,
        untuned=FORMS,
        names_source=True,
        begin={"lr": 0.056},
    ),
    "poisson": Task(
        "Poisson equation, float64",
        _poisson,
        20,
        {"adam": 3.2e-2, "soap": 1.8e-2},
        seeds=_THREE,
        batch_size=512,
        metric="relative_error",
        untuned=FORMS,
        begin={"lr": 0.03, "damping": 0.003},
    ),
}
SMALL = {"transformer64-100": replace(TASKS["transformer64-400"], epochs=2, seeds=range(2))}


def main(
    task: Annotated[str, typer.Option("--task", metavar="NAME,…", help="Or all.")] = "all",
    data: options.Data = None,
    quick: options.QuickRun = False,
    jobs: options.Jobs = 2,
    threads: options.Threads = 1,
    draw: Annotated[Path | None, typer.Option("--draw", metavar="FILE.png")] = None,
    out: options.Out = None,
) -> None:
    """Beyond the paper: optimizers without any argument against tuned rivals.

    `--threads` are those of the timed steps; each training has one. `--draw` trains nothing: it
    draws one task of the record, TNT and TNT-EF with the rivals, as in README.md, and
    FILE-tall.png for phones.
    """
    # As in the processes of the pool: a run's numbers must not depend on the number of jobs.
    options.set_machine(1)
    tasks = SMALL if quick else {name: TASKS[name] for name in chosen(task, list(TASKS))}
    out = out or Path("results/defaults.json")
    if draw is not None:
        if len(tasks) > 1:
            raise typer.BadParameter("--draw needs one --task")
        with user_errors():
            runs = load_runs(out)["runs"]
        for name, one in tasks.items():
            shown = [r for r in rows(runs, name, one) if r.method in DRAWN]
            plot(shown[::-1], one, draw)
            plot(shown[::-1], one, draw.with_stem(f"{draw.stem}-tall"), tall=True)
        return
    with user_errors():
        file = RunFile(out, "defaults", {"schedule": SCHEDULE, "tuning_seed": TUNING_SEED})
        for name, one in tasks.items():
            maker = functools.partial(one.load, data)
            maker()  # missing data end the command here
            _train(file, name, one, maker, jobs)
            if one.after is None:
                _measure(file, name, one, maker, threads or 1)
    for name, one in tasks.items():
        plot(rows(file.runs, name, one)[::-1], one, out.with_name(f"{out.stem}-{name}.png"))
    text = page(file.runs, {**TASKS, **tasks})
    print(text)
    out.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    print(f"wrote {out}, {out.with_suffix('.md')} and pictures")


def tried(runs: Iterable[Mapping[str, Any]], task: str, method: str) -> dict[float, float]:
    """The last losses of a method's search by learning rate; infinite if they diverged."""
    keys = [(run["key"]["settings"], run) for run in runs if run["key"].get("task") == task]
    return {
        own["lr"]: last_loss(run)
        for own, run in keys
        if own is not None and own["optimizer"] == method and own["seed"] == TUNING_SEED
    }


def _train(file: RunFile, name: str, task: Task, maker: Callable[[], Problem], jobs: int) -> None:
    kept_of = functools.partial(kept, metric=task.metric)
    text = {"source": maker().description()["source"]} if task.names_source else {}

    def make(wanted: Iterable[Settings]) -> None:
        keys = {one: {"task": name, "settings": asdict(one), **text} for one in wanted}
        make_runs(file, maker, keys, kept_of, jobs)

    make(own for m in task.untuned for seed in task.seeds for own in _untuned(m, task, seed))
    first: Mapping[str, float] = task.centres
    if task.after is not None:
        first = _best(file, task.after, first)
    for _ in range(MOST_ROUNDS):
        # A search that was stopped goes on from its best rate.
        best = {method: best_rate(file.runs, name, method) or lr for method, lr in first.items()}
        searching, wanted = False, []
        for method, lr in best.items():
            if set(around(lr)) <= tried(file.runs, name, method).keys():
                wanted += [_settings(method, task, lr, seed) for seed in task.seeds]
            else:
                searching = True
                wanted += [_settings(method, task, near, TUNING_SEED) for near in around(lr)]
        make(wanted)
        if not searching:
            return
    raise ValueError(f"{name}: the best rates are still ends of the searches, {best}")


def _best(file: RunFile, task: str, methods: Iterable[str]) -> dict[str, float]:
    found = {method: best_rate(file.runs, task, method) for method in methods}
    if None in found.values():
        raise ValueError(f"{file.path} has no search of {task}: run --task {task} first")
    return {method: lr for method, lr in found.items() if lr is not None}


def best_rate(runs: Iterable[Mapping[str, Any]], task: str, method: str) -> float | None:
    """The searched rate of the lowest loss; the lowest rate if all diverged; None without runs."""
    found = tried(runs, task, method)
    return next(iter(ranked(found) or sorted(found)), None)


def _untuned(method: str, task: Task, seed: int) -> list[Settings]:
    """With the defaults, and with the settings to begin with."""
    own = _settings(method, task, None, seed)
    return [own, replace(own, **task.begin)] if task.begin and method in FORMS else [own]


def _settings(method: str, task: Task, lr: float | None, seed: int = 0) -> Settings:
    return modern_settings(method, task.epochs, lr, task.batch_size, seed)


def kept(record: Mapping[str, Any], metric: str | None) -> dict[str, Any]:
    """The part of a run's record that the table keeps: not the seconds of a shared machine."""
    losses = [
        epoch["smoothed_loss"] if metric is None else epoch["metrics"][metric]
        for epoch in record["epochs"]
    ]
    rounded = [round(loss, 6) if math.isfinite(loss) else None for loss in losses]
    return {
        "losses": rounded,
        "training_loss": record["final_smoothed_loss"],
        "epoch_steps": record["steps_per_epoch"],
        "diverged_at_step": record["diverged_at_step"],
    }


def last_loss(run: Mapping[str, Any]) -> float:
    """A run's last loss; infinite if it diverged."""
    if run["diverged_at_step"] is not None or run["losses"][-1] is None:
        return math.inf
    return float(run["losses"][-1])


# The seconds.


def _measure(
    file: RunFile, name: str, task: Task, maker: Callable[[], Problem], threads: int
) -> None:
    # All methods of a task in one entry: times of different hours do not compare. The last entry
    # counts. PSGD-Kron's steps all update its factors, as in the first 1000 of a run.
    key = {"task": name, "settings": None, "threads": threads}
    methods = (*task.untuned, *task.centres)
    if set(methods) <= _seconds(file.runs, key).keys():
        return
    problem = maker()
    # A hundredth of the rates: all stay finite.
    own = {m: _settings(m, task, task.centres.get(m)) for m in methods}
    early = {m: root_steps(problem, s) for m, s in own.items() if s.early_roots}
    torch.set_num_threads(threads)
    steps = {m: problem_step(problem, replace(s, lr=s.lr / 100)) for m, s in own.items()}
    for step in steps.values():
        step()  # the first one makes the state, statistics and inverses
        step()  # the first one of SOAP and KL-Shampoo updates nothing
    kinds = sorted({k for m, s in own.items() for k in run_kinds(s, 2000, early.get(m, 0))})
    samples = time_kinds(steps, kinds, 0.0, 20, 20)
    torch.set_num_threads(1)
    found = {
        method: {kind.label: summary(taken)["median"] for kind, taken in times.items()}
        for method, times in samples.items()
    }
    file.add({**key, "methods": methods}, {"median_seconds": found, "root_steps": early})


def root_steps(problem: Problem, settings: Settings) -> int:
    """The steps until a run's factors are no longer inverse square roots."""
    model = seeded(problem.build, settings.seed)
    optimizer = build_optimizer(model, settings, problem.likelihood)
    shuffle, augment = (torch.Generator().manual_seed(settings.seed) for _ in range(2))
    epoch_steps = problem.steps_per_epoch(settings.batch_size)
    for step in range(settings.epochs * epoch_steps):
        if step % epoch_steps == 0:
            order = problem.order(settings.batch_size, shuffle)
        inputs, targets = problem.batch(order[step % epoch_steps], augment)
        factor = lr_multiplier(SCHEDULE, step, epoch_steps, settings.epochs * epoch_steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * factor
        optimizer.zero_grad()
        problem.loss(problem.outputs(model, inputs), targets).backward()
        optimizer.step()
        if not optimizer.param_groups[0]["takes_roots"]:
            return step
    return settings.epochs * epoch_steps


def _times(runs: Iterable[Mapping[str, Any]], key: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last entry of a task's times; one without methods if there is none."""
    found = [run for run in runs if key.items() <= run["key"].items()]
    return found[-1] if found else {"median_seconds": {}}


def _seconds(runs: Iterable[Mapping[str, Any]], key: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last times of a task's steps, by method and kind; empty if there are none."""
    seconds: Mapping[str, Any] = _times(runs, key)["median_seconds"]
    return seconds


def run_kinds(settings: Settings, steps: int, roots: int = 0) -> list[Kind]:
    """The kind of each step of a run, of which the first `roots` take inverse square roots.

    >>> [kind.label for kind in run_kinds(modern_settings("tnt"), 100)].count("plain")
    20
    """
    if settings.stat_interval is None:
        return [PLAIN] * steps
    group = asdict(settings)
    kinds = []
    for t in range(steps):
        has_statistics, has_inverses = (
            is_due({**group, "step": t}, name) for name in ("stat_interval", "inverse_interval")
        )
        kinds.append(Kind(has_statistics, has_inverses, has_inverses and t < roots))
    return kinds


# The table.


class Difference(NamedTuple):
    """A mean difference between runs of the same seeds; negative is better."""

    mean: float
    verdict: str


def paired(own: Sequence[float], other: Sequence[float]) -> Difference:
    """The difference of two methods' losses, paired by seed: the same start and batches.

    "below" or "above" if the 95 % interval of the mean difference excludes 0, else "level".

    >>> paired([1.0, 1.1, 1.2], [1.5, 1.7, 1.6]).verdict
    'below'
    """
    values = [mine - its for mine, its in zip(own, other, strict=True)]
    if not all(map(math.isfinite, values)):
        return Difference(math.nan, "diverged")
    mean, half = statistics.mean(values), math.inf
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stats.t.ppf(0.975, len(values) - 1)) * error  # Student's t
    return Difference(mean, "below" if mean < -half else "above" if mean > half else "level")


def steps_to(curve: Sequence[float | None], epoch_steps: int, loss: float) -> float:
    """The steps until a loss is reached, linear between epochs; infinite if it never is.

    >>> steps_to([3.0, 2.0, 1.0], 10, 1.5)
    25.0
    """
    before = None
    for number, value in enumerate(curve, 1):
        if value is not None and value <= loss:
            back = 0.0 if before is None else (loss - value) / (before - value)
            return epoch_steps * (number - back)
        before = value
    return math.inf


@dataclass(frozen=True)
class Row:
    """The results of one method on one task.

    Attributes:
        method: its name.
        arguments: `DEFAULT`, or what it was given besides; of a rival `TUNED`.
        lr: its learning rate.
        curves: the losses of every run's epochs, by seed.
        final: the last losses by seed; infinite for a run that diverged.
        clock: the seconds after 0, 1, ... steps.
        against: the difference from each rival after as many steps.
        time: the seconds to each rival's mean last loss over the rival's; infinite if not reached.
    """

    method: str
    arguments: str
    lr: float
    curves: list[list[float | None]]
    final: list[float]
    clock: list[float]
    against: dict[str, Difference]
    time: dict[str, float]


def rows(runs: Sequence[Mapping[str, Any]], name: str, task: Task) -> list[Row]:
    """The rows of the methods whose runs and steps are recorded, the untuned optimizers first.

    If a rival's final runs are recorded at several rates, the lowest mean loss counts: the rate
    that one seed has chosen may be unstable from others.
    """
    times = _times(runs, {"task": task.after or name, "settings": None})
    recorded: dict[Settings, list[Mapping[str, Any]]] = {}
    for run in runs:
        settings = run["key"]["settings"]
        if run["key"]["task"] == name and settings and settings["seed"] in task.seeds:
            recorded.setdefault(variant(Settings(**settings)), []).append(run)
    # By optimizer and arguments: one entry for each rival.
    finals: dict[tuple[str, str], tuple[Settings, list[Mapping[str, Any]]]] = {}
    for settings, members in recorded.items():
        place = settings.optimizer, _arguments(settings, task)
        best = finals.get(place)
        is_whole = len(members) == len(task.seeds)
        if is_whole and (best is None or _mean_loss(members) < _mean_loss(best[1])):
            finals[place] = settings, sorted(members, key=lambda r: r["key"]["settings"]["seed"])
    order = (*task.untuned, *task.centres)
    wanted = [p for p in finals if p[0] in order and p[0] in times["median_seconds"]]
    wanted.sort(key=lambda p: (order.index(p[0]), p[1] != DEFAULT, p[1]))
    clocks = {p: _clock(finals[p][0], finals[p][1][0], times) for p in wanted}
    last = {p: [last_loss(run) for run in finals[p][1]] for p in wanted}
    found = []
    for p in wanted:
        goals = {
            rival: place
            for rival in task.centres
            if (place := (rival, TUNED)) in last and rival != p[0]
        }
        reach = {rival: statistics.fmean(last[place]) for rival, place in goals.items()}
        settings, members = finals[p]
        own_times = {
            rival: statistics.fmean(_seconds_to(run, clocks[p], loss) for run in members)
            / clocks[goals[rival]][-1]
            for rival, loss in reach.items()
            if math.isfinite(loss)
        }
        against = {rival: paired(last[p], last[place]) for rival, place in goals.items()}
        curves = [list(run["losses"]) for run in members]
        found.append(Row(p[0], p[1], settings.lr, curves, last[p], clocks[p], against, own_times))
    return found


DEFAULT, TUNED = "default", "tuned"


def _arguments(settings: Settings, task: Task) -> str:
    """What an optimizer of tnt_optim was given besides its defaults; a rival is tuned."""
    if settings.optimizer not in task.untuned:
        return TUNED
    own = asdict(variant(_settings(settings.optimizer, task, None)))
    differing = {n: v for n, v in asdict(settings).items() if v != own[n]}
    return ", ".join(f"{name} {value}" for name, value in differing.items()) or DEFAULT


def _mean_loss(runs: Iterable[Mapping[str, Any]]) -> float:
    return statistics.fmean(map(last_loss, runs))


def _clock(settings: Settings, run: Mapping[str, Any], times: Mapping[str, Any]) -> list[float]:
    seconds = times["median_seconds"][settings.optimizer]
    roots = times.get("root_steps", {}).get(settings.optimizer, 0) if settings.early_roots else 0
    kinds = run_kinds(settings, settings.epochs * run["epoch_steps"], roots)
    return [0.0, *itertools.accumulate(seconds[kind.label] for kind in kinds)]


def _seconds_to(run: Mapping[str, Any], clock: Sequence[float], loss: float) -> float:
    step = steps_to(run["losses"], run["epoch_steps"], loss)
    return float(numpy.interp(step, range(len(clock)), clock, right=math.inf))


TITLE = """# Optimizers without any argument against tuned rivals

Mean loss after the last step ± standard deviation over seeds; the difference from each rival,
"below" or "above" if its 95 % interval by seed excludes 0; the mean time of a step; the time to
each rival's last loss in units of the rival's whole run. A row with arguments says which."""


def page(runs: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]) -> str:
    """The tables of all tasks with runs."""
    found = {name: rows(runs, name, task) for name, task in tasks.items()}
    parts = [f"## {tasks[name].label}\n\n" + _table(own) for name, own in found.items() if own]
    return "\n\n".join([TITLE, *parts])


def _table(found: Sequence[Row]) -> str:
    rivals = [row.method for row in found if row.method in RIVALS]
    names = [NAMES.get(m, METHODS[m].label.split(" + ")[0]) for m in rivals]
    times = [f"to {name}'s" if n else f"time to {name}'s loss" for n, name in enumerate(names)]
    header = ("", "learning rate", "loss", *names, "ms per step", *times)
    return "\n".join(table(header, [cells(row, rivals) for row in found]))


def cells(row: Row, rivals: Sequence[str]) -> tuple[str, ...]:
    """A row as text: label, rate, loss, differences from the rivals, ms, and times to theirs."""
    lost = sum(not math.isfinite(value) for value in row.final)
    loss = f"diverged ({lost} of {len(row.final)})"
    # Errors of an equation are far below one.
    small = not lost and statistics.fmean(row.final) < 0.1
    digits = ".1e" if small else ".3f"
    if not lost:
        spread = f" ± {statistics.stdev(row.final):{digits}}" if len(row.final) > 1 else ""
        loss = f"{statistics.fmean(row.final):{digits}}{spread}"
    against, times = ["-"] * len(rivals), ["-"] * len(rivals)
    for number, rival in enumerate(rivals):
        if rival in row.against:
            mean, verdict = row.against[rival]
            against[number] = f"{mean:+{digits}} {verdict}" if math.isfinite(mean) else verdict
            time = row.time.get(rival)
            if time is not None:
                times[number] = f"{time:.2f}" if math.isfinite(time) else "not reached"
    pace = f"{1000 * row.clock[-1] / (len(row.clock) - 1):.1f}"
    label = METHODS[row.method].label
    lr = f"{row.lr:g}" if row.arguments == TUNED else row.arguments
    return label, lr, loss, *against, pace, *times


def plot(found: Sequence[Row], task: Task, path: Path, *, tall: bool = False) -> None:
    """Draw the losses of the methods that did not diverge; seconds are of steps timed alone."""
    curves: dict[str, Curve] = {}
    for row in found:
        if not all(map(math.isfinite, row.final)):
            continue
        columns = [[math.nan if x is None else x for x in c] for c in zip(*row.curves, strict=True)]
        epoch_steps = (len(row.clock) - 1) // len(columns)
        steps = [epoch_steps * number for number in range(1, len(columns) + 1)]
        method = METHODS[row.method]
        own = {DEFAULT: "", TUNED: ", tuned"}.get(row.arguments, f", {row.arguments}")
        seconds = [row.clock[step] for step in steps]
        label = NAMES.get(row.method, method.label) + own
        curves[label] = Curve(label, method.colour, steps, seconds, columns)
    goals = [curve for label, curve in curves.items() if label.split(",")[0] in GOALS]
    loss_label = "training loss" if task.metric is None else task.metric.replace("_", " ")
    title = f"{task.label}, {len(task.seeds)} seeds"
    first = next((row for row in found if (row.method, row.arguments) == ("tnt-ef", DEFAULT)), None)
    if first is not None and (said := message(first)):
        title = f"{said.replace(' and ', chr(10) + 'and ') if tall else said}\n{title}"
    plot_curves(list(curves.values()), path, title, loss_label, goals, tall=tall)


def message(row: Row) -> str:
    """What the picture says: how fast the drop-in form reaches the rivals' last losses.

    Empty if there is no such rival, or its loss is not reached from every seed.
    """
    ratios = [
        f"{NAMES[rival]}'s last loss in {share:.2f} of its time"
        for rival in NAMES
        if NAMES[rival] in GOALS and math.isfinite(share := row.time.get(rival, math.inf))
    ]
    return f"TNT(params) reaches {' and '.join(ratios)}" if ratios else ""
