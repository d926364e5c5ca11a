"""Every example trains, where its trainer is installed."""

import runpy
from pathlib import Path

import pytest
from commands import ROOT, python
from optimizers import NO_FAILURES

FOLDER = ROOT / "examples"
# The packages that each example imports, other than this one and torch.
NEEDS = {
    "accelerate_loop": ("accelerate", "sklearn"),
    "hugging_face_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning", "sklearn"),
    "one_sided_shampoo": (),
    "plain_loop": (),
    "poisson": (),
}
# This one is rewarded, and takes many steps at a time.
REWARDED = {"ppo"}
# Methods of one's own, which tests/optim/test_own_optimizer.py tests.
METHODS = {"muon", "soap"}
# These need processes of their own.
LAUNCHED = {"data_parallel"}
STEPS = 50


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *NEEDS,
        *REWARDED,
        *METHODS,
        *LAUNCHED,
    }


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


@pytest.mark.parametrize("name", sorted(METHODS))
def test_example_of_a_method(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) < 1.5  # log(5) = 1.61


def test_the_agent_of_ppo_learns() -> None:
    pytest.importorskip("gymnasium")
    lengths, opt = runpy.run_path(str(FOLDER / "ppo.py"))["main"](15)
    assert sum(lengths[-3:]) > 3 * sum(lengths[:3])
    assert opt.failures() == NO_FAILURES


@pytest.mark.parametrize("name", sorted(LAUNCHED))
def test_example_with_torchrun(name: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    done = python(*launcher, str(FOLDER / f"{name}.py"), **environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss")[1].split()[0]) for line in done.stdout.splitlines()]
    assert losses[-1] < 0.5 * losses[0] and str(NO_FAILURES) in done.stdout


def test_tensorboard_of_the_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    runpy.run_path(str(FOLDER / "plain_loop.py"))["main"](20, str(tmp_path))
    (events,) = tmp_path.iterdir()
    assert b"loss" in events.read_bytes()
