"""The programs that count launches and time the host, on small calls."""

import json
from pathlib import Path

import pytest
import torch

import tnt_kernels
from tools import host_time, launch_counts


def test_launches_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_counts, "SETS", ("square4096",))
    monkeypatch.setattr("sys.argv", ["launch_counts", f"--out={tmp_path / 'counts.json'}"])
    launch_counts.main()
    gram, products = json.loads((tmp_path / "counts.json").read_text())["rows"]
    whole = 2 * 4 * 4096**2  # both parts of the matrix
    assert gram["launches"] == 2 and gram["packed_bytes"] == 2 * whole
    assert products["launches"] == 3 and products["packed_bytes"] == 3 * whole
    assert products["programs"] == 2 * 32 * 32
    assert "| square4096 | mode_products | 3 " in capsys.readouterr().out


def test_the_host_takes_a_gpus_path_and_starts_nothing() -> None:
    params, directions = [torch.ones(8, 8)], [torch.ones(8, 8)]
    for _ in range(2):
        with host_time.as_on_a_gpu():
            tnt_kernels.scaled_step_(params, directions, 0.5, 0.0)
    assert (params[0] == 1).all()
    assert host_time.microseconds(lambda: None) > 0
    tnt_kernels.scaled_step_(params, directions, 0.5, 0.0)
    assert (params[0] == 0.5).all()
