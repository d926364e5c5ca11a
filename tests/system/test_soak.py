"""A short soak ends well, its lives are a function of the seed, and its checks find faults."""

import itertools
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tools import soak
from tools.measuring.records import read_json
from tools.soak import (
    BATCH,
    CHECKPOINTS,
    ERRORS,
    FACTORS,
    KILLS,
    KINDS,
    NAN,
    NEGATIVE,
    NOTHING,
    NUMERICAL,
    RESTART,
    STATISTICS,
    Fault,
    Life,
    Soak,
    SoakError,
    Training,
    draw,
    expected_codes,
    part,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 300


def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[Life] = []
    monkeypatch.setattr(soak, "train", lambda planned: lives.extend(train(planned)) or lives)
    out = tmp_path / "soak.json"
    app = soak.typer.Typer()
    app.command()(soak.main)
    done = CliRunner().invoke(app, ["--steps", str(STEPS), "--seed", "1", "--out", str(out)])
    assert done.exit_code == 0 and "FAILED" not in done.output, done.output
    record = read_json(out)
    assert all(record["checks"].values()) and len(record["checks"]) == 4
    # Every life ends at its fault, and the next one starts at the checkpoint before it.
    ends = [fault for fault in draw(1, STEPS, STEPS // 25) if fault.kind not in NUMERICAL]
    assert [life.end for life in lives] == [*ends, Fault(STEPS, NOTHING, 0.0)]
    for before, after in itertools.pairwise(lives):
        assert after.first == before.end.step // CHECKPOINTS * CHECKPOINTS
        assert after.processes != before.processes
    saving = sum(fault.kind.saving for fault in ends)
    # Survivors of another fault may have begun a checkpoint, too.
    assert record["result"]["half_written_checkpoints"] >= saving > 0
    assert list(tmp_path.iterdir()) == [out]


def test_an_unplanned_end_stops_the_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor expects a restart where a process raises."""
    planned = Soak(tmp_path, 0, 20, [Fault(4, ERRORS[0], 0.0)])
    monkeypatch.setattr(soak, "expected_codes", lambda end, processes: [0] * processes)
    with pytest.raises(SoakError, match="exit codes must be"):
        train(planned)


def test_faults_are_drawn_for_steps_where_they_are_possible() -> None:
    for seed in range(5):
        faults = draw(seed, 1000, 80)
        assert faults == draw(seed, 1000, 80) != draw(seed + 1, 1000, 80)
        assert len({fault.step for fault in faults}) == len(faults) == 80
        counts = Counter(fault.kind for fault in faults)
        assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1
        for fault in faults:
            assert 0 < fault.step < 999
            if fault.kind == NEGATIVE:
                assert fault.step % FACTORS == 0
            if fault.kind == NAN:
                assert fault.step % STATISTICS == 0
            if fault.kind.saving:
                assert (fault.step + 1) % CHECKPOINTS == 0


def test_expected_exit_codes() -> None:
    kill_one, kill_all, *_ = KILLS
    assert expected_codes(Fault(9, NOTHING, 0.0), 2) == [0, 0]
    assert expected_codes(Fault(1, RESTART, 0.9), 2) == [0, 0]
    assert expected_codes(Fault(1, kill_all, 0.0), 2) == [-9, -9]
    assert expected_codes(Fault(1, kill_one, 0.6), 4) == [1, 1, -9, 1]
    assert expected_codes(Fault(1, ERRORS[0], 0.0), 2) == [3, 1]


def test_a_fault_changes_the_training() -> None:
    """Or the clean run could not tell whether it was repeated."""
    ends = set()
    for kind, processes in ((NOTHING, 1), (NAN, 1), (NEGATIVE, 1), (NAN, 4)):
        training = Training(0, 12)
        for step in range(12):
            fault = Fault(step, kind if step == FACTORS else NOTHING, 0.3)
            fails = fault.kind in NUMERICAL and processes == 1
            with pytest.warns() if fails else nullcontext():
                training.step(step, fault, processes)
        assert torch.equal(training.taken, torch.ones(12, dtype=torch.int64))
        ends.add(tuple(training.parameters().tolist()))
    assert len(ends) == 4


@pytest.mark.parametrize("places", [1, 2, 4])
def test_parts_are_the_batch(places: int) -> None:
    rows = [row for place in range(places) for row in part(place, places)]
    assert rows == list(range(BATCH))
