"""SIGKILL in the middle of a checkpoint: the last good one loads, and training goes on from it."""

import copy
import io
import math
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Snapshot
from test_faults import SHAPES, Run
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import save as save_in_parts

pytestmark = pytest.mark.usefixtures("one_thread")


class Mortal(io.FileIO):
    """A file whose writer dies by SIGKILL when it has written so many bytes, of all such files.

    To ask for the descriptor, as fsync does, counts as one byte more.
    """

    left = math.inf

    def write(self, data: Any) -> int:
        """Writes what is left to write, and dies if that is not all."""
        view = memoryview(data).cast("B")
        if len(view) > Mortal.left:
            super().write(view[: int(Mortal.left)])
            os.kill(os.getpid(), signal.SIGKILL)
        Mortal.left -= len(view)
        return super().write(view)

    def fileno(self) -> int:
        """The descriptor."""
        if Mortal.left < 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Mortal.left -= 1
        return super().fileno()


def save_to_file(run: Run, path: Path) -> None:
    """How to save: never over the last good file. Readers see the old one or the new one."""
    partial = path.with_name(path.name + ".tmp")
    content = {"params": [p.detach() for p in run.params], "opt": run.opt.state_dict()}
    with Mortal(partial, "wb") as file:
        torch.save(content, file)
        os.fsync(file.fileno())
    os.replace(partial, path)


def save_to_folder(run: Run, path: Path) -> None:
    """The same with ``torch.distributed.checkpoint``, which writes ``.metadata`` last."""
    params = {str(n): p.detach() for n, p in enumerate(run.params)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being alone
        save_in_parts({"params": params, "opt": run.opt.state_dict()}, checkpoint_id=path)


def load_from_folder(run: Run, path: Path) -> None:
    run.opt.allocate_state()
    params = {str(n): p.detach() for n, p in enumerate(run.params)}
    content = {"params": params, "opt": run.opt.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_in_place(content, checkpoint_id=path)
    run.opt.load_state_dict(content["opt"])


def dies(write: Callable[[], None], after: float) -> bool:
    """Whether a child that calls this, and may write so many bytes, is killed on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking is fine: nothing else runs
        child = os.fork()
    if child == 0:
        try:
            Mortal.left = after
            write()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_kill_during_a_checkpoint_leaves_the_last_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FileSystem,
        "create_stream",
        lambda _, path, mode: Mortal(path, mode) if "w" in mode else open(path, mode),
    )
    run, undisturbed, rng = Run(), Run(), random.Random(0)
    undisturbed.steps(0, 10)
    save, load = (save_to_file, Run.load) if kind == "file" else (save_to_folder, load_from_folder)
    run.step(0)
    good = tmp_path / "good"
    monkeypatch.setattr(Mortal, "left", math.inf)
    save(run, good)
    files = [good] if kind == "file" else list(good.iterdir())
    size = sum(file.stat().st_size for file in files)
    for number in range(1, 9):
        wanted = run.snapshot()
        run.step(number)
        after = {1: 0, 2: size - 1, 3: size}.get(number, rng.randrange(size))
        target = good if kind == "file" else tmp_path / f"target-{number}"
        assert dies(lambda to=target: save(run, to), after)  # type: ignore[misc]
        if kind == "folder":
            assert not (target / ".metadata").exists()
        resumed = Run()
        load(resumed, good)
        resumed.snapshot().assert_equals(_without_gradients(wanted))
        good = good if kind == "file" else tmp_path / f"good-{number}"
        save(run, good)
    load(resumed, good)
    resumed.step(9)
    resumed.snapshot().assert_equals(undisturbed.snapshot())


def _without_gradients(snapshot: Snapshot) -> Snapshot:
    other = copy.copy(snapshot)
    other.content = {**snapshot.content, "grads": [None] * len(SHAPES)}
    return other
