"""The GPU's job without a GPU: what it measures, on the CPU, and its report of a recorded run."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import (
    clocks,
    comparisons,
    kernels,
    optimizer_steps,
    report,
    stages,
    training,
)
from bench.gpu.driver import NO_DEVICE, run_stage
from bench.gpu.json_lines import JsonLines, read
from bench.gpu.origin import origin
from bench.gpu.record import gather, ratio
from bench.gpu.stage_process import Job, SomethingIsMissing
from bench.gpu.targets import TARGETS
from bench.kernels.timing import OURS, Candidate
from bench.stage_runs import NOT_RUN, PASSED
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


# Measuring, on the CPU.

SMALL = ParameterSet("small", ((9, 5), (4, 3, 2, 2), (7,), (8193, 3)), "a note")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ParameterSet:
    """A set among the sets, timed shortly."""
    monkeypatch.setitem(PARAMETER_SETS, SMALL.name, SMALL)
    for module, name in (
        (kernels, "EAGER_SECONDS"),
        (kernels, "GRAPH_SECONDS"),
        (optimizer_steps, "SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.01)
    return SMALL


class Recorded(clocks.HostClock):
    """A clock with graphs."""

    def graph(self, run: clocks.Run) -> clocks.Run:
        return run


CEILINGS = {"side": 64, "copied": 1 << 16}


def test_kernels_are_measured(
    small: ParameterSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "clock_of", lambda device: Recorded())
    planned = list(kernels.cases(("small",), ("small",)))
    assert kernels.measure(Job(tmp_path, 600), CPU, planned, **CEILINGS)
    record = gather(tmp_path)
    timed = [line for line in record["kernels"] if line["kind"] == "kernels"]
    assert [(line["op"], line["precision"]) for line in timed] == [
        (case.op, case.precision) for case in planned
    ]
    assert {line["op"] for line in timed} == set(comparisons.COMPARISONS)
    for line in timed:
        candidates = list(line["eager"])
        assert candidates[0] == OURS and len(candidates) >= 2
        assert {*line["graph"], *line["no_graph"]} == set(candidates)
        assert all(len(line["eager"][name]["samples"]) >= 3 for name in candidates)
        assert line["errors"][OURS] < 1e-4
        assert line["note"].startswith("a note")
    kinds = [line["kind"] for line in record["kernels"]]
    assert kinds[:2] == ["origin", "ceilings"] and kinds[-2:] == ["ceilings", "end"]


def test_what_is_wrong_is_not_timed_and_the_rest_is(
    small: ParameterSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gram = comparisons.gram

    def spoiled(parameter_set: ParameterSet, device: torch.device) -> comparisons.Comparison:
        comparison = gram(parameter_set, device)
        comparison.expected[0] += 1
        return comparison

    monkeypatch.setitem(comparisons.COMPARISONS, "gram_ema_", spoiled)
    planned = [kernels.Case(op, small, "highest") for op in ("gram_ema_", "mode_products")]
    assert not kernels.measure(Job(tmp_path, 600), CPU, planned, **CEILINGS)
    kinds = {line.get("op"): line for line in read(tmp_path / "kernels.jsonl")}
    assert kinds["gram_ema_"]["kind"] == "failed"
    assert "is allowed" in kinds["gram_ema_"]["why"]
    assert kinds["mode_products"]["kind"] == "kernels"


def test_what_there_is_no_time_for_is_said(small: ParameterSet, tmp_path: Path) -> None:
    planned = [kernels.Case("gram_ema_", small, "highest")]
    assert kernels.measure(Job(tmp_path, 5), CPU, planned, **CEILINGS)
    line = read(tmp_path / "kernels.jsonl")[2]
    assert (line["kind"], line["why"]) == ("not run", "out of time")


def test_the_targeted_comparisons_come_first() -> None:
    planned = list(kernels.cases())
    targeted = {(op, name) for (op, _, _), sets in TARGETS.items() for name in sets}
    first = [(c.op, c.parameter_set.name) for c in planned if c.precision == "highest"]
    measured = targeted - {("TNT.step", "mnist_ae"), ("TNT.step", "resnet32")}
    assert measured <= set(first[: len(kernels.SETS) * len(kernels.TARGETED)])
    assert {name for _, name in targeted} <= {*kernels.SETS, *optimizer_steps.SETS}


def test_candidates_alternate_and_graphs_are_refused_with_a_reason() -> None:
    order: list[str] = []

    def run(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = clocks.alternating(clocks.HostClock(), {name: run(name) for name in "ab"}, 0.0)
    assert order == list("abab" + "abbaab")  # warm-ups, then another one first each round
    assert all(len(values["samples"]) == 3 for values in times.values())  # type: ignore[arg-type]
    candidates = [Candidate(name, run(name), list) for name in "ab"]
    graphs, why = clocks.captured(Recorded(), candidates, {"b": "it waits"})
    assert (list(graphs), why) == (["a"], {"b": "it waits"})
    assert clocks.alternating(clocks.HostClock(), {}, 1.0) == {}


def test_steps_are_measured(small: ParameterSet, tmp_path: Path) -> None:
    assert optimizer_steps.measure(Job(tmp_path, 600), CPU, ("small",))
    lines = [line for line in read(tmp_path / "step.jsonl") if line["kind"] == "step"]
    kinds = [kind.name for kind in optimizer_steps.KINDS]
    assert [line["kind_of_step"] for line in lines] == kinds * 2
    assert list(lines[0]["eager"]) == [OURS, "plain torch", "AdamW, fused", "SGD, foreach"]
    for line in lines:
        wanted = {OURS, "plain torch"} if line["precision"] == "highest" else set()
        assert set(line["errors"]) == wanted


def test_training_wants_its_data(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(SomethingIsMissing, match="MNIST|IDX|no "):
            training.train_all(Job(tmp_path, 60, data=folder), CPU)
    assert read(tmp_path / "training.jsonl") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_stage_alone_without_a_device_says_so(tmp_path: Path) -> None:
    for name in ("kernels", "step", "training"):
        stage = next(stage for stage in stages.STAGES if stage.name == name)
        outcome = run_stage(stage, tmp_path, 120)
        assert (outcome.status, outcome.message) == (NOT_RUN, NO_DEVICE)


# The report, of a fake run.


def timed(**medians: float) -> dict[str, Any]:
    return {name: {"median": m, "quartiles": [m, m]} for name, m in medians.items()}


def fake_run(folder: Path) -> None:
    """gram_ema_ wins on one set and loses on the other; a step, a training, and what was not."""
    known = origin(CPU, "abc")
    lines = JsonLines(folder / "kernels.jsonl")
    lines.add("origin", **known)
    for rate in (1e12, 2e12):
        names = dict.fromkeys(("copy", "float32", "tf32", "bf16"), rate)
        lines.add("ceilings", rates=names)
    for name, ours in (("resnet32", 1e-5), ("vgg16", 5e-3)):
        for setting in ("highest", "high"):
            lines.add(
                "kernels",
                **{"op": "gram_ema_", "set": name, "precision": setting, "note": ""},
                work={"useful_flops": 10**7, "effective_flops": 0, "bytes": 10**7},
                errors={OURS: 1e-6, "einsum + lerp_": 1e-5, "addmm_": 1e-5},
                eager=timed(**{OURS: ours, "einsum + lerp_": 1e-3, "addmm_": 2e-3}),
                graph=timed(**{OURS: ours / 2, "einsum + lerp_": 1e-3}),
                no_graph={"addmm_": "a reason"},
            )
    case = {"op": "mode_products", "set": "gpt2_full", "precision": "high"}
    lines.add("not run", **case, why="out of time")
    case["op"] = "damped_inverse"
    lines.add("failed", **case, why="ValueError: a|b")
    case = {"op": "gram_ema_", "set": "resnet32", "precision": "highest"}
    lines.add("launches", **case, candidate=OURS, kernels=2, copies=1)
    lines = JsonLines(folder / "step.jsonl")
    lines.add("origin", **{**known, "commit": "another"})
    lines.add(
        "step",
        **{"op": "TNT.step", "set": "mnist_ae", "precision": "highest", "note": ""},
        kind_of_step="T1 = 1, T2 = 20",
        errors={},
        eager=timed(**{OURS: 1e-3, "plain torch": 4e-3, "AdamW, fused": 1e-4}),
    )
    lines = JsonLines(folder / "training.jsonl")
    lines.add("origin", **known)
    lines.add(
        "training",
        **{"optimizer": "TNT", "precision": "highest", "warm_start_seconds": 0.5},
        seconds_per_epoch=0.25,
        epochs=[{"smoothed_loss": 196.5}, {"smoothed_loss": float("nan")}],
    )
    lines = JsonLines(folder / "tests.jsonl")
    counts = {"passed": 5, "failed": 1, "skipped": 2, "failures": [["a.b", "wrong"]]}
    lines.add("tests", group="on_gpu", status=None, seconds=3.0, **counts)


def test_report_of_a_recorded_run(tmp_path: Path) -> None:
    fake_run(tmp_path)
    results = tmp_path / "results"
    stage = next(stage for stage in stages.STAGES if stage.name == "report")
    outcome = run_stage(stage, tmp_path, 120, ["--results", str(results)])
    assert outcome.status == PASSED, (tmp_path / "report.log").read_text()
    page = (results / "gpu.md").read_text()
    # Reached in both precisions; lost, and marked.
    assert "| `gram_ema_` | resnet32 | einsum + lerp_ | 60 | 100.00 | 200.00 |" in page
    assert "| `gram_ema_` | resnet32 | addmm_ | 20 | 200.00 |  | 200.00 |  | reached |" in page
    lost = "**0.20** | **0.40** | **0.20** | **0.40** | **missed**"
    assert f"| `gram_ema_` | vgg16 | einsum + lerp_ | 10 | {lost} |" in page
    assert "| `damped_inverse` | faces_ae | linalg.inv | 5 |  |  |  |  | not measured |" in page
    assert "| mnist_ae | plain torch | 5 | 4.00 |  |  |  | **missed** |" in page
    assert "| 5 us" not in page and "2.00 TB/s" in page
    assert "| 100 % |" in page  # of a copy: 10^7 bytes in half of 10 us at 2 TB/s
    assert "- addmm_ has no graph: a reason." in page
    assert f"{OURS} 3" in page
    assert "| kernels | mode_products gpt2_full | high | not run | out of time |" in page
    assert "| kernels | damped_inverse gpt2_full | high | failed | ValueError: a/b |" in page
    assert "| TNT | highest | 196.50, diverged | 0.250 | 0.50 |" in page
    assert "| commit of step | another" in page
    assert "- failed: `a.b`: wrong" in page and "on_gpu ran out of time" in page
    raw = json.loads((results / "gpu.json").read_text())
    assert ratio(raw["kernels"][3], "addmm_", OURS) == pytest.approx(200)
    pytest.importorskip("matplotlib")
    assert (results / "gpu_ratios.png").stat().st_size > 1000
    assert (results / "gpu_step.png").stat().st_size > 1000


def test_no_report_of_nothing(tmp_path: Path) -> None:
    JsonLines(tmp_path / "kernels.jsonl").add("origin", **origin(CPU))
    job = Job(tmp_path, 60, results=tmp_path / "results")
    with pytest.raises(SomethingIsMissing, match="^nothing was measured"):
        report.write_report(job)
    assert not (tmp_path / "results").exists()


def test_the_commit_is_as_given_only_where_git_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("bench.gpu.origin")
    monkeypatch.setattr(module, "provenance", lambda device: {"commit": None, "dirty": None})
    assert origin(CPU, "abc")["commit"] == "abc (as given; the files came without git)"
    assert origin(CPU)["commit"] is None
    monkeypatch.setattr(module, "provenance", lambda device: {"commit": "def", "dirty": False})
    assert origin(CPU, "abc")["commit"] == "def"


def test_baselines_equal_the_reference() -> None:
    """Those written for the GPU, at odd sizes."""
    comparison = comparisons.inverse(SMALL, CPU)
    for candidate in comparison.candidates:
        candidate.run()
        results: list[Tensor] = list(candidate.results())
        for result, wanted in zip(results, comparison.expected, strict=True):
            error = (result - wanted).abs().max() / wanted.abs().max()
            assert float(error) < 1e-4, candidate.name
