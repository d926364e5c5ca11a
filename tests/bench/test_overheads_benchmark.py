"""The benchmark of a step's companions: its figures are the record's, its patch holds."""

import copy
import json
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bench.overheads.__main__ as command
from bench.overheads import guards
from bench.overheads.__main__ import PROTOCOL, main
from bench.overheads.guards import GUARDS, watched_guards, without_guards
from bench.overheads.measuring import CALLS, alternated
from bench.overheads.page import check_shares, page
from bench.overheads.steps import BOTH, COMPANIONS, NOTHING, PLAIN, STATISTICS, steps_of_a_cycle
from tnt_optim import TNT
from tools.measuring.parameter_sets import PARAMETER_SETS, ParameterSet

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDS = 3


def record_of(arguments: list[str], out: Path) -> dict[str, Any]:
    assert main([*arguments, "--out", str(out)]) == 0
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_the_command_writes_a_record_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARAMETER_SETS, "tiny", ParameterSet("tiny", ((5, 4), (5,)), "a note"))
    monkeypatch.setattr(command, "busy_share", lambda: 0.0)
    out = tmp_path / "record.json"
    arguments = ["--sets", "tiny", "--fault-sets", "tiny", "--rounds", str(ROUNDS)]
    record = record_of(arguments, out)
    assert record_of(arguments, out) == record  # everything is there
    text = out.with_suffix(".md").read_text()
    assert text == page(record)
    assert "a note." in text and "not to be relied on" not in text
    assert text.count("not measured") == 3
    seconds = {run["key"]["part"]: run["seconds"] for run in record["runs"]}
    assert list(seconds["companions"]) == list(COMPANIONS)
    assert list(seconds["guards"]) == [NOTHING.name, STATISTICS.name, BOTH.name]
    assert list(seconds["calls"]) == [NOTHING.name, STATISTICS.name, BOTH.name, *CALLS]
    for samples in seconds["companions"].values():
        assert len(samples) == ROUNDS and min(samples) > 0
    for kind in seconds["guards"].values():
        assert set(kind) == {"with", "without", "within"}
        assert all(len(samples) == ROUNDS for samples in kind.values())
    assert record["provenance"][0]["versions"]["torch"] == torch.__version__


def test_no_quartiles_of_one_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "1", "--out", str(tmp_path / "record.json")])
    assert "argument --rounds" in capsys.readouterr().err


def made_up() -> dict[str, Any]:
    """A record of which every goal is met, each of its figures by hand."""
    companions = {name: [0.1, 0.2, 0.4] for name in COMPANIONS}
    companions['graft="sgd"'] = [0.105, 0.21, 0.42]
    companions['graft="adam"'] = [0.109, 0.218, 0.436]
    kinds = {NOTHING.name: 0.04, STATISTICS.name: 0.08, BOTH.name: 0.16}
    checks = {
        name: {"with": [value] * 3, "without": [value * 0.99] * 3, "within": [value * 0.005] * 3}
        for name, value in kinds.items()
    }
    calls = {name: [value] * 3 for name, value in kinds.items()} | {
        "diagnostics": [0.042] * 3,
        "failures": [1e-5] * 3,
        "memory_estimate": [1e-4] * 3,
    }
    parts = [
        ("gpt2", "companions", companions),
        ("mnist_ae", "guards", checks),
        ("mnist_ae", "calls", calls),
    ]
    origin = {
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m bench.overheads",
        "machine": {"cpu": "a CPU", "cores": 7},
        "threads": {"torch": 3},
        "versions": {"torch": "2.0"},
    }
    record = {
        "protocol": PROTOCOL,
        "runs": [
            {"key": {"set": name, "part": part}, "note": "", "seconds": seconds,
             "busy_before": 0.0, "busy_after": 0.0}
            for name, part, seconds in parts
        ],
        "provenance": [origin],
    }  # fmt: skip
    return copy.deepcopy(record)


def goals(record: dict[str, Any]) -> list[str]:
    """The last cell of each goal's row."""
    lines = page(record).split("## Goals")[1].split("\n## ")[0].splitlines()
    return [line.split("|")[-2].strip() for line in lines if line.startswith("| ")][1:]


def test_the_pages_figures_are_the_records() -> None:
    record = made_up()
    text = page(record)
    assert '| gpt2 | graft="adam" | 218 | 164 to 327 | 1.090 (1.090 to 1.090) |' in text
    assert "| 5.00 % over | met |" in text and "| 9.00 % over | met |" in text
    # (19 * 0.08 + 0.16) / 20 = 0.084: a call is half of it, and every 100 steps half a percent.
    assert "| 1.00 % and 0.50 %, together 1.50 % | met |" in text
    assert "| `diagnostics()` | 42 | 42 to 42 | 1.05 (1.05 to 1.05) | 0.5 (0.5 to 0.5) |" in text
    assert (
        "| statistics due | 80 | 79.2 | 1.00 % (1.00 % to 1.00 %) | 0.50 % (0.50 % to 0.50 %) |"
    ) in text
    assert "Commit 0123456789ab, 2026-01-02, a CPU, 7 cores, 3 threads, torch 2.0" in text
    changed = copy.deepcopy(record)
    changed["runs"][2]["seconds"]["diagnostics"] = [0.021] * 3
    changed["provenance"][0]["machine"]["cores"] = 5
    assert "together 1.25 %" in page(changed) and "5 cores" in page(changed)
    record["runs"][0]["busy_after"] = 0.5
    assert "gpt2, companions: **Something else used 50 %" in page(record)


def test_verdicts_flip_with_the_numbers() -> None:
    met, missed = "met", "**not met**"
    record = made_up()
    assert goals(record) == [met, met, met]
    record["runs"][0]["seconds"]['graft="sgd"'] = [0.1, 0.23, 0.45]
    assert goals(record) == [missed, met, met]
    record["runs"][0]["seconds"]['graft="adam"'] = [0.2, 0.3, 0.4]
    assert goals(record) == [missed, missed, met]
    record["runs"][2]["seconds"]["diagnostics"] = [0.085] * 3
    assert goals(record) == [missed, missed, missed]
    record["protocol"]["goals"]["faults"]["at_most"] = 0.03
    assert goals(record) == [missed, missed, met]
    assert "at most 3 % of a step" in page(record)
    record["runs"][1]["seconds"][STATISTICS.name]["without"] = [0.076] * 3
    assert goals(record) == [missed, missed, missed]
    del record["runs"][1]
    assert goals(record) == [missed, missed, ""]
    assert "not measured" in page(record)


def test_a_cycles_share_is_that_of_all_its_steps() -> None:
    assert steps_of_a_cycle(1, 20) == {NOTHING.name: 0, STATISTICS.name: 19, BOTH.name: 1}
    assert steps_of_a_cycle(10, 100) == {NOTHING.name: 90, STATISTICS.name: 9, BOTH.name: 1}
    run = made_up()["runs"][1]
    run["seconds"][BOTH.name]["without"] = [0.1] * 3
    expected = (9 * 0.0008 + 90 * 0.0004 + 0.06) / (9 * 0.08 + 90 * 0.04 + 0.16)
    assert check_shares(run, (10, 100)) == pytest.approx([expected] * 3)
    assert check_shares(run, (10, 100), within=True) == pytest.approx([0.005] * 3)


def test_candidates_take_turns() -> None:
    order = []

    def candidate(name: str) -> float:
        order.append(name)
        return float(len(order))

    names = "abc"
    found = alternated({name: lambda name=name: candidate(name) for name in names}, 3)  # type: ignore[misc]
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert found == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


def test_the_plain_step_has_no_companion() -> None:
    assert COMPANIONS[PLAIN] == {}
    assert set(PROTOCOL["goals"]["graft"]["companions"]) == {'graft="sgd"', 'graft="adam"'}


# The checks, taken out and put back.


def with_a_state() -> TNT:
    param = nn.Parameter(torch.randn(3, 2))
    opt = TNT([param], stat_interval=1, inverse_interval=2, fisher="empirical")
    param.grad = torch.randn(3, 2)
    for _ in range(3):
        opt.step()
    param.grad = torch.full((3, 2), torch.nan)
    return opt


def statistics_after(opt: TNT) -> list[torch.Tensor]:
    opt.step()
    (state,) = opt.state.values()
    return list(state["stats"])


def test_without_checks_a_gradient_that_is_no_number_passes() -> None:
    opt = with_a_state()
    with without_guards(), warnings.catch_warnings(action="error"):
        assert all(stat.isnan().all() for stat in statistics_after(opt))
    assert opt.failures() == {"skipped_statistics": 0, "failed_inverses": 0}


def test_the_checks_are_put_back() -> None:
    opt = with_a_state()
    with pytest.raises(KeyError), without_guards():
        raise KeyError
    with pytest.warns(RuntimeWarning, match="not finite"):
        assert all(stat.isfinite().all() for stat in statistics_after(opt))
    assert opt.failures()["skipped_statistics"] == 1
    opt.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        opt.step()


def test_a_setting_that_is_wrong_passes_without_checks() -> None:
    opt = with_a_state()
    opt.param_groups[0]["max_factor_dim"] = "none"
    with without_guards():
        opt.step()
    with pytest.raises(ValueError, match="max_factor_dim"):
        opt.step()


@pytest.mark.parametrize("name", GUARDS)
def test_every_check_is_there_and_replaced(name: str) -> None:
    before = pkgutil.resolve_name(name)
    assert callable(before)
    with without_guards():
        assert pkgutil.resolve_name(name) is GUARDS[name]
    with watched_guards():
        assert pkgutil.resolve_name(name) is not before
    assert pkgutil.resolve_name(name) is before


def test_a_check_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: pkgutil.resolve_name(name) for name in GUARDS}
    monkeypatch.setitem(GUARDS, "tnt_optim.kronecker.no_such_check", guards._nothing)
    with pytest.raises(AttributeError, match="no_such_check"), without_guards():
        pass
    assert all(pkgutil.resolve_name(name) is guard for name, guard in before.items())


def test_every_check_is_watched() -> None:
    opt = with_a_state()
    group = opt.param_groups[0]
    group.update(stat_interval=10, step=11)
    with watched_guards() as spent:
        opt.step()
    assert len(spent) == 3  # the settings, and twice what was reported
    group.update(stat_interval=1, step=11)
    with watched_guards() as spent, pytest.warns(RuntimeWarning, match="not finite"):
        opt.step()
    assert len(spent) == 5  # the gradients, and their report
    group.update(step=10)
    with watched_guards() as spent, pytest.warns(RuntimeWarning, match="not finite"):
        opt.step()
    assert len(spent) == 6  # the report of inverses
    assert min(spent) > 0
