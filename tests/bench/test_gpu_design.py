"""The program that measures what would refute the GPU's design, at toy size on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from bench import gpu_design
from bench.gpu_design import Line


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_design, "SHAPES", ((16, 9), (5,), (9000, 2)))
    monkeypatch.setattr(gpu_design, "SIZES", (64,))
    monkeypatch.setattr(gpu_design, "SETS", ("resnet32",))
    monkeypatch.setattr(gpu_design, "SET_OPERATORS", ("mode_products",))
    monkeypatch.setattr(gpu_design, "INVERSES_BEFORE", {"resnet32": 0.1})
    monkeypatch.setattr(gpu_design, "EAGER", ("scaled_step_",))


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[dict[str, object]]]:
    out = tmp_path / "design.json"
    monkeypatch.setattr("sys.argv", ["gpu_design", "--device=cpu", f"--out={out}"])
    with pytest.raises(SystemExit) as ended, torch.no_grad():
        gpu_design.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads(out.read_text())["rows"]


def test_every_section_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, rows = measured(tmp_path, monkeypatch)
    assert [row["section"] for row in rows if row["section"] == "errors"] == ["errors"] * 12
    assert all(row["said"] == "PASS" for row in rows if row["section"] == "errors")
    assert {row["section"] for row in rows} == {"errors", "cuBLAS", "sets", "inverses", "eager"}
    assert all(float(str(row["value"])) > 0 for row in rows if row["section"] != "errors")
    assert "PASS  gram_ema_ (16, 9), 3xTF32" in capsys.readouterr().out


def test_a_section_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device) -> None:
        raise torch.OutOfMemoryError("none left")

    def good(device: torch.device) -> list[Line]:
        return [Line("b", "a rate", 3.0, "TB/s", at_least=2.0)]

    monkeypatch.setattr(gpu_design, "SECTIONS", {"a": fails, "b": good})
    code, (failed, passed) = measured(tmp_path, monkeypatch)
    assert code == 1 and failed == {"section": "a", "error": "none left"}
    assert passed["said"] == "PASS" and passed["value"] == 3.0


def test_limits() -> None:
    assert Line("", "", 2.0, "", at_least=2.0).said == "PASS"
    assert Line("", "", 1.9, "", at_least=2.0).said == "FAIL"
    assert Line("", "", 2.1, "", at_most=2.0).said == "FAIL"
    assert Line("", "", float("nan"), "", at_most=2.0).said == "FAIL"
    assert Line("", "", 2.0, "").said == ""
