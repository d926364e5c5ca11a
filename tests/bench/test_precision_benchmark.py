"""The benchmark of precision: what it counts, and that its page says what its record says."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import half_statistics

from bench.precision import contract, resume, sampled, training
from bench.precision.__main__ import main
from bench.precision.bits import differing
from bench.precision.page import page

pytest.importorskip("sklearn")

SMALL = ["--seeds", "1", "--steps", "3", "--classes", "4", "--rows", "16", "--resume-steps", "3"]
SMALL += ["--contract", "maximize_is_true_or_false"]


@pytest.fixture(scope="module", autouse=True)
def threads_put_back() -> Iterator[None]:
    """The command sets their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a small run."""
    out: Path = tmp_path_factory.mktemp("precision") / "record.json"
    assert main([*SMALL, "--out", str(out)]) == 0
    before = out.read_text()
    assert main([*SMALL, "--out", str(out)]) == 0  # everything is there
    assert out.read_text() == before
    return out


def part(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in record["runs"] if run["key"]["part"] == name]


def test_a_small_run(written: Path) -> None:
    record = json.loads(written.read_text())
    (origin,) = record["provenance"]
    assert origin["versions"]["torch"] == torch.__version__ and origin["commit"]
    assert [run["key"]["way"] for run in part(record, "training")] == list(training.WAYS)
    resumed = part(record, "resume")
    assert [(r["key"]["optimizer"], r["key"]["precision"]) for r in resumed] == resume.CASES
    for run in resumed:
        assert run["parameters_differ"] == run["state_differs"] == 0
        assert 0 < run["moved_since"] <= run["of_parameters"] < run["of_state"]
    (sampling,) = part(record, "sampled")
    for ratios in sampling["ratios"].values():
        assert len(ratios) == 4
        assert all(abs(ratio - 1) < half_statistics(torch.float16) for ratio in ratios.values())
    (tests,) = part(record, "contract")
    factored = {"TNT", "TNT, empirical", "Shampoo"}
    for name, counts in tests["tests"].items():
        assert counts == {"passed": 3 * (name in factored), "failed": 0, "skipped": 0}


def test_the_page_is_made_of_the_record(written: Path) -> None:
    record = json.loads(written.read_text())
    before = copy.deepcopy(record)
    text = page(record)
    assert written.with_suffix(".md").read_text() == text and record == before

    first = part(record, "training")[0]
    for seed, (loss, error, moved) in enumerate(
        [(4.0, 0.5, 1.0), (1.0, 0.1, 0.2), (2.0, 0.3, 0.4)]
    ):
        run = {"training_loss": loss, "validation_error": error, "last_step_moved": moved}
        key = {**first["key"], "seed": seed, "way": "another way"}
        record["runs"].append({**first, **run, "key": key})
    record["runs"].append({**first, "training_loss": None, "key": {**first["key"], "way": "lost"}})
    ratios = {"1": {"a": 0.25, "b": 7.0}, "default": {"a": 0.75, "b": 1.5}}
    record["runs"].append({"key": {"part": "sampled", "classes": 77, "rows": 3}, "ratios": ratios})
    part(record, "resume")[0].update(parameters_differ=1234, state_differs=5)
    part(record, "contract")[0]["tests"]["KFAC"]["failed"] = 17
    record["protocol"]["steps"] = 31
    changed = page(record)
    quartiles = "2.00000 (1.50000 to 3.00000) | 30.00 (20.00 to 40.00) | 40.0 (30.0 to 70.0)"
    assert f"\n| another way | {quartiles} |\n" in changed
    assert "\n| lost | not finite | " in changed
    assert "\n| 77 | 3 | 0.2500 to 7.0000 | 0.7500 to 1.5000 |\n" in changed
    assert "| 1,234 of 5,122; 5 of " in changed
    assert "\n| KFAC | 0 | 17 | 0 |\n" in changed and "\n| all | 9 | 17 | 0 |\n" in changed
    assert "; 31 steps of TNT" in changed


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.int16),
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
    ],
)
def test_a_difference_of_one_bit_is_counted(dtype: torch.dtype, bits: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    other = tensor.clone()
    assert differing([tensor], [other]) == 0
    for count, bit in enumerate(range(8 * dtype.itemsize), 1):
        other.view(bits).view(-1)[bit % 15] ^= torch.tensor(1, dtype=bits) << bit
        assert differing([tensor], [other]) == min(count, 15)
    assert differing([tensor, tensor], [tensor, other]) == min(count, 15)


def test_numbers_are_compared_by_bits_alone() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(())
    assert differing([nan], [nan.clone()]) == 0
    assert differing([zero], [-zero]) == 1
    assert differing([torch.zeros(4, 0)], [torch.zeros(4, 0)]) == 0
    assert differing([torch.ones(3, 2).t()], [torch.ones(2, 3)]) == 0
    for wrong in (torch.zeros(1), torch.zeros((), dtype=torch.float64)):
        with pytest.raises(ValueError, match="of the same shapes and dtypes"):
            differing([zero], [wrong])
    with pytest.raises(ValueError, match="of the same shapes and dtypes"):
        differing([zero], [])


@pytest.mark.parametrize("optimizer", resume.OPTIMIZERS)
def test_one_bit_lost_in_the_file_is_counted(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the parameters or in the optimizer's state, and the command fails."""
    through_a_file = resume.through_a_file
    assert resume.compared(optimizer, "float32", 3)["parameters_differ"] == 0
    for place in ("model", "opt"):

        def spoiled(content: Any, place: str = place) -> Any:
            read = through_a_file(content)
            found = read["model"] if place == "model" else read["opt"]["state"]
            largest = max(resume.tensors(found), key=torch.Tensor.numel)
            # Of the largest number and not the last one, which rounding may make good again.
            largest.view(-1)[largest.abs().argmax()].view(torch.int32).bitwise_xor_(1 << 12)
            return read

        monkeypatch.setattr(resume, "through_a_file", spoiled)
        found = resume.compared(optimizer, "float32", 3)
        assert found["parameters_differ"] > 0 and found["state_differs"] > 0


def test_the_command_fails_where_resuming_did(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(written.read_text())
    for change in ({"parameters_differ": 1}, {"state_differs": 1}):
        changed = copy.deepcopy(record)
        part(changed, "resume")[-1].update(change)
        out = tmp_path / "changed.json"
        out.write_text(json.dumps(changed))
        assert main([*SMALL, "--out", str(out)]) == 1
    part(record, "contract")[0]["tests"]["TNT"]["failed"] = 1
    out.write_text(json.dumps(record))
    assert main([*SMALL, "--out", str(out)]) == 1


# ------------------------------------------------------------------ what is measured


def test_every_way_trains() -> None:
    found = {way: training.trained(way, 0, 40) for way in training.WAYS}
    wanted = found["float32"]
    assert wanted["training_loss"] < 2.0 < training.trained("float32", 0, 1)["training_loss"]
    for run in found.values():
        assert run["steps_taken"] == 40 and 0 < run["last_step_moved"] <= 1
        assert run["training_loss"] == pytest.approx(wanted["training_loss"], rel=0.2)
        assert run["failures"] == {"skipped_statistics": 0, "failed_inverses": 0}
    assert len({run["training_loss"] for run in found.values()}) == len(found)


def test_a_scale_that_is_too_small_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients below float16's smallest number, as of a mean over many rows."""
    monkeypatch.setattr(sampled, "SCALES", {"small": 2.0**-17, "default": None})
    ratios = sampled.measured(10, 64)["ratios"]
    assert all(abs(r - 1) < half_statistics(torch.float16) for r in ratios["default"].values())
    assert max(abs(r - 1) for r in ratios["small"].values()) > 0.1


REPORT = """<testsuites><testsuite>
<testcase name="test_a[net-sampled]"/>
<testcase name="test_a[0-empirical-x]"><skipped message="no"/></testcase>
<testcase name="test_a[kfac]"><failure>oh</failure></testcase>
<testcase name="test_b[kfac]"><error>oh</error></testcase>
<testcase name="test_b[shampoo]"/><testcase name="test_c[shampoo]"/>
<testcase name="test_shampoo"/>
</testsuite></testsuites>"""


def test_outcomes_are_counted_by_optimizer() -> None:
    assert {name: list(c.values()) for name, c in contract.outcomes(REPORT).items()} == {
        "TNT": [1, 0, 0],
        "TNT, empirical": [0, 0, 1],
        "Shampoo": [2, 0, 0],
        "KFAC": [0, 2, 0],
        "TNT with AdamW": [0, 0, 0],
        "other": [1, 0, 0],
    }


def test_without_a_test_there_is_no_count() -> None:
    with pytest.raises(contract.ContractError, match="pytest ended with 5:\n"):
        contract.counted(contract.files()[:1], "no_such_test")


def test_a_record_with_other_settings_is_refused(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written.read_text()
    with pytest.raises(SystemExit):
        main([*SMALL, "--steps", "4", "--out", str(written)])
    assert "steps was 3 and is 4" in capsys.readouterr().err
    assert written.read_text() == before
