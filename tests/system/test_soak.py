"""A short soak ends well, and its checks find what they are there for."""

import json
import random
from collections import Counter
from contextlib import nullcontext as nothing
from pathlib import Path

import pytest
import torch

from bench.soak.command import main
from bench.soak.plan import ERRORS, KILLS_SAVING, KINDS, NAN, NEGATIVE, Fault, draw
from bench.soak.supervisor import SoakError, Supervisor
from bench.soak.training import BATCH, SCHEDULE, Training, part, rest, write_data
from bench.soak.worker import Life, digest

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 300


def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.json"
    assert main(["--steps", str(STEPS), "--seed", "1", "--out", str(out)]) == 0
    assert "FAILED" not in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert list(record["checks"].values()) == [True] * 7
    result = record["result"]
    assert set(result["faults"]) == set(KINDS)
    assert result["starts"] == 1 + sum(result["ended_by"].values()) == len(record["lives"])
    # Every life goes on from a checkpoint that was there, and with other processes.
    lives = record["lives"]
    for before, after in zip(lives, lives[1:], strict=False):
        assert after["from"] % SCHEDULE.checkpoints == 0
        assert after["from"] <= before["to"] < after["from"] + 2 * SCHEDULE.checkpoints
        assert after["processes"] != before["processes"]
    assert lives[-1]["to"] == STEPS and lives[-1]["end"] == "done"
    assert result["half_written_checkpoints"] > 0
    assert result["loss"] == pytest.approx(result["loss_clean"], rel=1e-9)
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert list(tmp_path.iterdir()) == [out]


def test_what_fails_unasked_ends_the_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: processes told of a fault that the supervisor does not know of."""
    known = Supervisor(tmp_path, 0, 20, [], lambda _: None)
    known.prepare()
    unknown = [Fault(3, next(iter(ERRORS)), 0.0, 0.0)]
    life = Supervisor._life

    def told(self: Supervisor, processes: int, shard: str | None) -> Life:
        made = life(self, processes, shard)
        return Life(**{**vars(made), "faults": unknown})

    monkeypatch.setattr(Supervisor, "_life", told)
    monkeypatch.setattr("bench.soak.supervisor._Watch._raised", lambda _: None)
    with pytest.raises(SoakError, match="InjectedError"):
        known.train()


def test_faults_befall_steps_at_which_they_can() -> None:
    for seed in range(5):
        faults = draw(seed, 1000, 80, SCHEDULE)
        assert faults == draw(seed, 1000, 80, SCHEDULE) != draw(seed + 1, 1000, 80, SCHEDULE)
        assert len({fault.step for fault in faults}) == len(faults) == 80
        counts = Counter(fault.kind for fault in faults)
        assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1
        for fault in faults:
            assert 0 < fault.step < 999
            if fault.kind == NEGATIVE:
                assert fault.step % SCHEDULE.factors == 0
            if fault.kind == NAN:
                assert fault.step % SCHEDULE.statistics == 0
            if fault.kind in KILLS_SAVING:
                assert (fault.step + 1) % SCHEDULE.checkpoints == 0


def test_a_fault_leaves_its_trace_in_the_training(tmp_path: Path) -> None:
    """The clean run is no judge of faults that change nothing."""
    write_data(tmp_path / "digits.pt")
    ends = set()
    for change in ({}, {"spoiled": True}, {"negative": 0.0}, {"observed": rest(1, 4)}):
        training = Training(tmp_path / "digits.pt", 0)
        for step in range(12):
            wanted = change if step == SCHEDULE.factors else {}
            with pytest.warns() if set(wanted) & {"spoiled", "negative"} else nothing():
                training.step(step, part(0, 1), **wanted)
        ends.add(digest(training))
    assert len(ends) == 4


@pytest.mark.parametrize("places", [1, 2, 4])
def test_parts_are_the_batch(places: int) -> None:
    rows = [row for place in range(places) for row in part(place, places)]
    assert rows == list(range(BATCH))
    place = random.Random(places).randrange(places)
    assert sorted(part(place, places) + rest(place, places)) == rows
