from experiments.bars import OPERATORS, RESULTS, main, speedup
from tnt_kernels.benchmark.records import read_json


def test_a_speedup_is_over_the_fastest_rival() -> None:
    common = {"op": "gram_ema_", "set": "gpt2", "precision": "highest"}
    others = [
        {**common, "candidate": "tnt_kernels", "ratio": [1.0]},
        {**common, "candidate": "einsum + lerp_", "ratio": [3.0]},
        {**common, "candidate": "addmm_", "ratio": [2.0]},
        {**common, "candidate": "addmm_, graph", "ratio": [1.5]},
        {**common, "candidate": "addmm_", "ratio": [1.2], "precision": "high"},
        {**common, "candidate": "addmm_", "ratio": [1.1], "set": "vgg16"},
    ]
    assert speedup({"rows": others}, "gram_ema_") == 2.0


def test_the_page_has_the_numbers_of_the_picture(tmp_path) -> None:
    """On the EPYC: the table of bench/results/README.md."""
    record = read_json(RESULTS / "kernels.json")
    assert [round(speedup(record, op), 2) for op in OPERATORS] == [3.34, 2.54, 3.87, 3.63, 1.64]
    main(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000
