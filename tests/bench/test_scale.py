"""Costs on large models, next to formulas and to the recorded traffic of real processes."""

import json
import math
from pathlib import Path

import pytest

from bench import scale
from bench.processes import T1, T2
from tools.measuring.parameter_sets import PARAMETER_SETS, gpt2

RECORD = Path(__file__).parents[2] / "bench" / "results" / "processes.json"


@pytest.mark.parametrize("way", ["none", "fully_shard"])
def test_traffic_is_what_processes_hand_to_collectives(way: str) -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    rows = [row for row in rows if row["way"] == way and row["processes"] > 1]
    assert len(rows) >= 4
    for row in rows:
        kinds = row["sent_bytes"]
        # A period of T2 = 2 T1 steps has one step with statistics and inverses, one with the first.
        mean = (
            sum(kinds["statistics and inverses"])
            + sum(kinds["statistics"])
            + (T2 - 2) * sum(kinds["nothing"])
        ) / T2
        numbers = sum(map(math.prod, PARAMETER_SETS[row["parameters"]].shapes))
        name = "every process" if way == "none" else way
        wanted = scale.handed(numbers, name, row["processes"], 1 / T1)
        assert mean == pytest.approx(wanted, rel=0.01)


def test_muon_multiplies_fifteen_times() -> None:
    m, n = 24, 40
    # Five iterations: X X', its square, and a product with X, in the smaller dimension.
    assert scale.muon((n, m)).flops == 5 * (4 * m * m * n + 2 * m**3)
    assert scale.muon((n, m)).state == 4 * m * n


def test_tnt_has_the_state_that_it_estimates() -> None:
    full, diagonal = scale.tnt((64, 32)), scale.tnt((50257, 32))
    assert full.state == 4 * (2 * 64 * 32 + 2 * (64**2 + 32**2))
    assert diagonal.state == 4 * (2 * 50257 * 32 + 2 * (50257 + 32**2))
    # Products in every step; with d = 32 and a diagonal each counts one multiplication a number.
    assert diagonal.flops > 50257 * 32 * (2 * 32 + 1)
    assert diagonal.bytes > 4 * 9 * 50257 * 32


def test_owners_share_all_and_the_largest_parameter_is_the_limit() -> None:
    shapes = gpt2(2, 64, 128)
    for method in ("TNT", "SOAP", "Muon"):
        each = scale.costs(method, shapes)
        whole, two, many = scale.total(each), scale.largest(each, 2), scale.largest(each, 500)
        assert whole.state / 2 <= two.state < whole.state
        assert many == scale.Cost(*(max(column) for column in zip(*each, strict=True)))


def test_models_have_their_names_sizes() -> None:
    assert [round(model.numbers / 1e7) for model in scale.MODELS] == [12, 132, 666]
