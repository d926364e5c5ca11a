"""Every example trains, where its trainer is installed."""

import runpy
from pathlib import Path

import pytest
from optimizers import NO_FAILURES

FOLDER = Path(__file__).parents[2] / "examples"
# The packages that each example imports, other than this one and torch.
NEEDS = {
    "accelerate_loop": ("accelerate", "sklearn"),
    "hugging_face_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning", "sklearn"),
    "one_sided_shampoo": (),
}
STEPS = 50


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NEEDS)


# Warnings of the trainers do not matter here; RuntimeWarnings of tnt_optim are errors.
@pytest.mark.filterwarnings("default", "error::RuntimeWarning")
@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    losses, opt = runpy.run_path(str(FOLDER / f"{name}.py"))["main"](STEPS)
    assert list(tmp_path.iterdir()) == []
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    for group in opt.param_groups:
        assert group["step"] == STEPS
        for param in group["params"]:
            assert all(stat.any() for stat in opt.state[param]["stats"])
            assert opt.state[param]["updates"] == STEPS
    assert opt.failures() == NO_FAILURES
