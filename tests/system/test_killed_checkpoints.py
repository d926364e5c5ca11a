"""SIGKILL in the middle of a checkpoint: the last good one loads, and training goes on from it."""

import io
import math
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Snapshot
from optimizers import made, net, train
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import save as save_in_parts


class Mortal(io.FileIO):
    """A file whose process kills itself after it has written so many bytes, to all such files.

    A request for the descriptor, as for fsync, counts as one byte more.
    """

    left = math.inf

    def write(self, data: Any) -> int:
        """Writes the bytes that are left, and dies if those are not all."""
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


class Run:
    """A training that saves to a file, or to a folder with torch.distributed.checkpoint."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = net()
        self.opt = made("sampled", self.model, graft="adam")
        self.kind = kind

    def content(self) -> dict[str, Any]:
        """Model and optimizer."""
        return {"net": self.model.state_dict(), "opt": self.opt.state_dict()}

    def save(self, path: Path) -> None:
        """Never writes over the last good checkpoint: readers see the old one or the new one."""
        if self.kind == "folder":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a single process
                save_in_parts(self.content(), checkpoint_id=path)  # writes .metadata last
            return
        partial = path.with_name(path.name + ".tmp")
        with Mortal(partial, "wb") as file:
            torch.save(self.content(), file)
            os.fsync(file.fileno())
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Goes back to a checkpoint."""
        if self.kind == "folder":
            self.opt.allocate_state()
            content = self.content()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_in_place(content, checkpoint_id=path)
        else:
            content = torch.load(path, weights_only=True)
        self.model.load_state_dict(content["net"])
        self.opt.load_state_dict(content["opt"])

    def snapshot(self) -> Snapshot:
        """Parameters and state, without gradients, to be compared bit for bit."""
        self.opt.zero_grad()
        return Snapshot(self.model.parameters(), self.opt)


def dies(write: Callable[[], None], after: float) -> bool:
    """Whether a child process that may write so many bytes is killed on the way."""
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


# By the point at which the process is killed: the bytes it has written, for a checkpoint's size.
POINTS: list[tuple[str, Callable[[int], int]]] = [
    ("before the first byte", lambda size: 0),
    ("within the header", lambda size: 1),
    ("after a quarter", lambda size: size // 4),
    ("after the half", lambda size: size // 2),
    ("after three quarters", lambda size: 3 * size // 4),
    ("before the last byte", lambda size: size - 1),
    ("before fsync", lambda size: size),
]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_kill_during_a_checkpoint_leaves_the_last_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FileSystem,
        "create_stream",
        lambda _, path, mode: Mortal(path, mode) if "w" in mode else open(path, mode),
    )
    monkeypatch.setattr(Mortal, "left", math.inf)
    run, undisturbed = Run(kind), Run(kind)
    steps = len(POINTS) + 1
    train(undisturbed.model, undisturbed.opt, range(steps))
    train(run.model, run.opt, [0])
    good = tmp_path / "good"
    run.save(good)
    files = [good] if kind == "file" else list(good.iterdir())
    size = sum(file.stat().st_size for file in files)
    for number, (point, bytes_of) in enumerate(POINTS, 1):
        wanted = run.snapshot()
        train(run.model, run.opt, [number])
        target = good if kind == "file" else tmp_path / f"target-{number}"
        assert dies(lambda to=target: run.save(to), bytes_of(size)), point  # type: ignore[misc]
        if kind == "folder":
            assert not (target / ".metadata").exists()
        resumed = Run(kind)
        resumed.load(good)
        resumed.snapshot().assert_equals(wanted)
        if kind == "folder":
            good = tmp_path / f"good-{number}"
        if number < len(POINTS):
            run.save(good)
    train(resumed.model, resumed.opt, [steps - 1])
    resumed.snapshot().assert_equals(undisturbed.snapshot())
