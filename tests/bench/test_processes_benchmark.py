"""The benchmark of processes that share steps: what it counts is what the sizes say."""

import json
from pathlib import Path

import pytest

from bench.processes.__main__ import main
from tools.measuring.parameter_sets import PARAMETER_SETS

FLOAT = 4


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, object]]:
    out = tmp_path_factory.mktemp("processes") / "record.json"
    arguments = ["--sets", "resnet32", "--processes", "2", "--periods", "1", "--threads", "1"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert main([*arguments, "--out", str(out)]) == 0  # everything is there
    runs = json.loads(out.read_text())["runs"]
    table = out.with_suffix(".md").read_text()
    assert table.count("\n| resnet32 |") == len(runs) == 5
    return {(run["key"]["processes"], run["key"]["way"]): run for run in runs}


def test_all_end_where_one_process_does(record: dict[tuple[int, str], dict[str, float]]) -> None:
    for (processes, way), run in record.items():
        assert run["processes_differ"] == 0.0
        assert run["difference"] <= 2e-6  # rounding in float32
        if processes == 2 and way in ("none", "inverses"):
            assert run["difference"] == 0.0


def test_traffic_is_what_the_sizes_say(record: dict[tuple[int, str], dict[str, dict]]) -> None:  # type: ignore[type-arg]
    parameters = PARAMETER_SETS["resnet32"]
    whole = FLOAT * parameters.numbers
    sampled = 2 * (whole + 2 * FLOAT)  # with two counts
    factors = FLOAT * sum(
        d if flat else d * d
        for view, kinds in zip(parameters.views, parameters.diagonal, strict=True)
        for d, flat in zip(view, kinds, strict=True)
    )
    codes = 2 * FLOAT * len(parameters.shapes)
    both = "statistics and inverses"
    assert sum(record[1, "none"]["sent_bytes"][both]) == 0
    sent = {way: {kind: sum(sizes) for kind, sizes in run["sent_bytes"].items()}
            for (processes, way), run in record.items() if processes == 2}  # fmt: skip
    assert sent["none"] == {both: sampled, "statistics": sampled, "nothing": 0}
    assert sent["directions"]["nothing"] == whole
    assert sent["directions"][both] == sampled + whole + codes
    assert sent["inverses"]["nothing"] == 0
    assert sent["inverses"][both] == sampled + factors + codes
    flags = 2 * FLOAT * len(parameters.shapes)  # which parameters have a gradient somewhere
    assert sent["fully_shard"]["nothing"] == 2 * whole + flags


def test_state_is_kept_once(record: dict[tuple[int, str], dict[str, list[int]]]) -> None:
    alone = record[1, "none"]["state_bytes"][0]
    assert record[2, "none"]["state_bytes"] == [alone, alone]
    for way in ("directions", "fully_shard"):
        state = record[2, way]["state_bytes"]
        assert sum(state) == alone
        assert max(state) < 0.6 * alone
    assert alone < sum(record[2, "inverses"]["state_bytes"]) < 2 * alone


def test_a_record_with_other_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    out.write_text(json.dumps({"experiment": "processes", "protocol": {"t1": 7}, "runs": []}))
    with pytest.raises(SystemExit):
        main(["--out", str(out)])
    assert "argument --out" in capsys.readouterr().err
