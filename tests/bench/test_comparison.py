"""Benchmarks time right results only, count work as by hand, and keep losing cases."""

import functools
import itertools
import json
import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bench.test_steps import (
    CYCLE,
    KINDS,
    OPTIONS,
    PLAIN,
    REFRESH,
    STATISTICS,
    T2,
    Parameters,
    steps_of,
)
from tnt_kernels.benchmark import comparison, report
from tnt_kernels.benchmark.clock import alternate
from tnt_kernels.benchmark.comparison import (
    OURS,
    Candidate,
    Comparison,
    check_finite,
)
from tnt_kernels.benchmark.limits import binding
from tnt_kernels.benchmark.work import (
    Work,
    grafted_work,
    gram_work,
    inverse_work,
    products_work,
    root_work,
    scaled_work,
    step_work,
    whitened_work,
)
from tools.measuring.parameter_sets import DEFAULT_SETS, PARAMETER_SETS, ParameterSet

CPU = torch.device("cpu")
SMALL = ParameterSet("small", ((5, 3), (7,), (4, 3, 3, 3)), note="said")


# Work.


def test_work_of_one_matrix_is_the_hand_count() -> None:
    one = ParameterSet("one", ((3, 5),))
    # Gram: G is 15 numbers. Mode 0: 3 * 4 / 2 entries of 5 products and sums; mode 1: 15 entries of
    # 3. S is read and written.
    gram = Work(6 * 5 * 2 + 15 * 3 * 2, 4 * (15 + 18 + 50), symmetric=True)
    assert gram_work(one) == gram
    # Inverses: d^3; S read, A written.
    assert inverse_work(one) == Work(27 + 125, 4 * (18 + 50))
    assert root_work(one) == Work(153 + 708, 4 * (18 + 50))
    # Products: 3 x 3 by 3 x 5, then 3 x 5 by 5 x 5.
    assert products_work(one) == Work(90 + 150, 4 * (15 + 15 + 9 + 25))
    # Whitened Gram matrices: a product more for each (90 and 150), and the factors are read.
    assert whitened_work(one) == Work(gram.flops + 90 + 150, gram.bytes + 4 * (9 + 25))
    # Both moments are read and written: m, g, v and the direction, so four times 15 more.
    assert grafted_work(one) == Work(90 + 150, 4 * (15 + 15 + 9 + 25 + 4 * 15))
    assert scaled_work(one) == Work(0, 4 * 3 * 15)
    # The step reads and writes momentum and weight, and reads the gradient: three times 15 more.
    assert step_work(one) == Work(90 + 150, 4 * (15 + 15 + 9 + 25 + 3 * 15))


def test_parameter_sets_are_the_models() -> None:
    assert set(DEFAULT_SETS) <= set(PARAMETER_SETS)
    sets = PARAMETER_SETS
    assert [sum(map(len, sets[name].views)) for name in ("mnist_ae", "resnet32")] == [24, 158]
    # ResNet-32 for CIFAR-10, option A, and GPT-2 small.
    for name, numbers in (("resnet32", 464_154), ("gpt2_full", 124_439_808)):
        assert sum(map(math.prod, sets[name].shapes)) == numbers
    assert len(sets["gpt2_full"].shapes) == 2 + 12 * 12 + 2
    assert sets["gpt2"].matrices[0] == [(50257,), (768, 768)]  # 50257 > 8192
    assert sets["resnet32"].views[0] == (16, 3, 9)


# Limits.


def test_the_limit_is_the_later_of_products_and_bytes() -> None:
    cpu = {"sgemm": 100.0, "ssyrk": 50.0, "copy": 10.0}
    work = Work(flops=400, bytes=30)
    symmetric = Work(flops=400, bytes=30, symmetric=True)
    assert binding(cpu, work, "highest") == ("sgemm", 4.0)
    assert binding(cpu, symmetric, "highest") == ("ssyrk", 8.0)
    assert binding(cpu, Work(flops=0, bytes=90), "high") == ("copy", 9.0)
    gpu = {"float32": 40.0, "tf32": 80.0, "copy": 10.0}
    assert binding(gpu, symmetric, "highest") == ("float32", 10.0)
    assert binding(gpu, work, "high") == ("tf32", 5.0)


# Comparisons.


in_turns = functools.partial(alternate, seconds=0.0)


def adding(name: str, size: float = 1.0, **settings: Any) -> Candidate:
    total = torch.zeros(2)
    return Candidate(name, lambda: total.add_(size), lambda: [total], [total], **settings)


def compared(candidates: list[Candidate], expected: list[Tensor], **settings: Any) -> list[Any]:
    rows: list[dict[str, Any]] = []
    compare = Comparison(CPU, "highest", in_turns, rows.extend)
    with patch("time.perf_counter", itertools.count().__next__):  # each sample takes a second
        compare("gram_ema_", SMALL, candidates, expected, **settings)
    return rows


def test_a_baseline_that_is_wrong_is_left_out_with_a_note() -> None:
    """Ours is an error."""
    ones = [torch.ones(2).double()]
    rows: list[dict[str, Any]] = []

    def run(precision: str, ours: float, baseline: float) -> None:
        compare = Comparison(CPU, precision, in_turns, rows.extend)
        candidates = [adding(OURS, ours), adding("linalg.inv", baseline)]
        compare("damped_inverse", SMALL, candidates, ones)

    with pytest.raises(ValueError, match=f"{OURS}: error must be at most"):
        run("high", 1.2, 1.0)
    run("high", 1.0, 1.2)
    (row,) = rows
    assert row["candidate"] == OURS
    assert row["note"] == "said; linalg.inv is left out at 'high': error 2e-01"


def test_rows_name_what_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    (row, other) = compared([adding(OURS), adding("addmm_")], [torch.ones(2).double()])
    assert row["engine"] in ("C++", "reference") and "engine" not in other
    served = SimpleNamespace(ops={"mode_products": {"cuda": "Triton", "cpu": "C++"}})
    monkeypatch.setattr(comparison, "backends", lambda: served)
    gpu = torch.device("cuda")
    chain = SimpleNamespace(chain=lambda: None)
    monkeypatch.setitem(sys.modules, "tnt_kernels.triton.cublas", chain)
    monkeypatch.setattr("tnt_kernels.triton.cublas", chain, raising=False)
    assert comparison.engine(lambda: chain.chain(), gpu) == "Triton, cuBLAS"
    assert comparison.engine(lambda: None, gpu) == "Triton"
    assert comparison.engine(lambda: pytest.fail("runs"), CPU) == "C++"


def test_every_candidate_has_a_row_with_its_ratio_to_the_first() -> None:
    ones = [torch.ones(2).double()]
    other = adding("AdamW", 3.0, compared=False)
    rows = compared([adding(OURS), adding("addmm_"), other], ones, work=Work(8, 4), steps=4)
    assert [row["candidate"] for row in rows] == [OURS, "addmm_", "AdamW"]
    ours, baseline, free = rows
    assert ours["median"] == 0.25 and ours["ratio"] == [1.0] * 3 and ours["rounds"] >= 3
    assert ours["work"] == [2, 1, False] and ours["note"] == "said" and "work" not in baseline
    assert baseline["error"] == 0.0 and "error" not in free
    assert baseline["baseline"] and "baseline" not in free and "baseline" not in ours
    assert baseline["ratio"][0] == baseline["median"] * 4 == 1.0


def test_a_wrong_candidate_is_never_timed() -> None:
    ones = [torch.ones(2).double()]
    with pytest.raises(ValueError, match="tnt_kernels: error must be"):
        compared([adding(OURS, 1.1)], ones)
    # A baseline may be ten times less accurate than ours.
    assert compared([adding(OURS), adding("x", 1 + 5e-5)], ones)[1]["error"] > 1e-5
    (row,) = compared([adding(OURS), adding("x", 1 + 5e-4)], ones)
    assert row["note"] == "said; x is left out at 'highest': error 5e-04"
    with pytest.raises(ValueError, match="tensor 0 did not change"):
        compared([adding(OURS), adding("idle", 0.0, compared=False)], ones)


# Steps.


def test_kinds_of_steps_have_due_what_they_say() -> None:
    assert [(k.due(k.stat_interval), k.due(T2)) for k in KINDS] == [(0, 0), (1, 0), (1, 1), (20, 1)]
    parameters = Parameters(SMALL, CPU)
    opt = parameters.tnt(parameters.new())
    before: dict[str, list[Tensor]] = {}

    def changed(name: str) -> bool:
        now = [t.clone() for p in opt.state.values() for t in p[name]]
        same = all(torch.equal(a, b) for a, b in zip(before.get(name, now), now, strict=True))
        before[name] = now
        return not same

    for param in opt.param_groups[0]["params"]:
        param.grad = param.grad * 2  # other gradients: refreshed statistics differ
    changed("stats"), changed("factors")
    for kind, wanted in (
        (PLAIN, (False, False)),
        (STATISTICS, (True, False)),
        (REFRESH, (True, True)),
    ):
        steps_of(opt, kind)()
        assert (changed("stats"), changed("factors")) == wanted, kind.name
    assert CYCLE.steps == T2


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_step_changes_the_update(name: str) -> None:
    parameters = Parameters(SMALL, CPU)

    def moved(settings: dict[str, Any]) -> list[Tensor]:
        settings = dict(settings)
        params = parameters.new(settings.pop("dtype", torch.float32))
        run = steps_of(parameters.tnt(params, **settings), PLAIN)
        for _ in range(5):
            run()
        return [p.detach().float() for p in params]

    plain, own = moved({}), moved(OPTIONS[name])
    same = all(torch.equal(a, b) for a, b in zip(plain, own, strict=True))
    assert same == (name == "plain")
    check_finite(name, own)


# The page.


def test_the_page_has_every_candidate_and_marks_losing_cases() -> None:
    ones = [torch.ones(2).double()]
    rows = compared([adding(OURS), adding("addmm_")], ones, work=Work(8, 4))
    rows[1]["ratio"] = [0.5, 0.4, 0.6]
    rows[0].update(least_seconds=0.5, limit="copy")
    machine = {"cpu": "a CPU", "cores": 2, "gpu": None}
    source = {
        "commit": "1234567890abcdef", "dirty": True, "date": "2026-01-02T03:04:05", "command": "c",
        "machine": machine, "versions": {"torch": "2"}, "threads": {"torch": 2},
    }  # fmt: skip
    limits = {"size": 64, "sgemm": 1e9}
    protocol = {"busy_before": 0.5, "busy_after": None}
    record = {"provenance": source, "protocol": protocol, "limits": limits, "rows": rows}
    page = report.page(json.loads(json.dumps(record)))
    assert "used 50 % of the machine" in page
    assert "**0.50**" in page and "50 % (copy)" in page and "1234567890ab with changes" in page
    assert page.count("| small") == 2
