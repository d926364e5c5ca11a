from pathlib import Path

from PIL import Image

from experiments.bars import OPERATORS, RESULTS, main, speedup
from tnt_kernels.benchmark.records import read_json

ROOT = Path(__file__).parents[2]


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
    assert speedup({"rows": others}, "gram_ema_", "gpt2") == 2.0


def test_the_picture_has_the_numbers_of_the_page(tmp_path: Path) -> None:
    """On the EPYC: those of the table in bench/results/README.md."""
    page = (RESULTS / "README.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| GPT-2, 2 of 12 blocks |"))
    cells = [cell.strip() for cell in row.split("|")]
    record = read_json(RESULTS / "kernels.json")
    for op in OPERATORS:
        assert f"{speedup(record, op, 'gpt2'):.2f}" in cells
    main(tmp_path / "bars.png")
    sizes = []
    for path in (tmp_path / "bars.png", ROOT / "docs/bars.png"):
        with Image.open(path) as picture:
            sizes.append(picture.size)
    assert sizes[0] == sizes[1]
