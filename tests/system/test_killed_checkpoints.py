"""SIGKILL in the middle of a checkpoint: the last good one loads, and training goes on from it."""

import io
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Snapshot
from optimizers import made, net, train
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import save as save_in_parts


class Mortal(io.FileIO):
    """A file whose process kills itself after it has written so many bytes, to all such files."""

    left = math.inf

    def write(self, data: Any) -> int:
        """Writes the bytes that are left, and dies if those are not all."""
        view = memoryview(data).cast("B")
        if len(view) > Mortal.left:
            super().write(view[: int(Mortal.left)])
            os.kill(os.getpid(), signal.SIGKILL)
        Mortal.left -= len(view)
        return super().write(view)


def save(path: Path, model: nn.Module, opt: Any) -> None:
    """To a folder if the path has no suffix. Never writes over the last good checkpoint."""
    content = {"net": model.state_dict(), "opt": opt.state_dict()}
    if not path.suffix:
        save_in_parts(content, checkpoint_id=path)  # writes .metadata last
        return
    partial = path.with_suffix(".tmp")
    with Mortal(partial, "wb") as file:
        torch.save(content, file)
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, model: nn.Module, opt: Any) -> None:
    """Goes back to a checkpoint."""
    if path.suffix:
        content = torch.load(path, weights_only=True)
    else:
        opt.allocate_state()
        content = {"net": model.state_dict(), "opt": opt.state_dict()}
        load_in_place(content, checkpoint_id=path)
    model.load_state_dict(content["net"])
    opt.load_state_dict(content["opt"])


@pytest.mark.filterwarnings("ignore")  # forking is fine, as nothing else runs
@pytest.mark.parametrize("name", ["good.pt", "good"])
def test_a_kill_during_a_checkpoint_leaves_the_last_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(_: Any, path: Path, mode: str) -> Any:
        return Mortal(path, mode) if "w" in mode else open(path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", opened)
    monkeypatch.setattr(Mortal, "left", math.inf)
    model, resumed, good = net(), net(), tmp_path / name
    opt, fresh = (made("sampled", each, graft="adam") for each in (model, resumed))
    train(model, opt, range(5))
    save(good, model, opt)
    size = sum(file.stat().st_size for file in ([good] if good.suffix else good.iterdir()))
    train(model, opt, [5])
    for left in (0, 1, size // 2, size - 1):
        target = good if good.suffix else tmp_path / f"target-{left}"
        child = os.fork()
        if child == 0:
            try:
                Mortal.left = left
                save(target, model, opt)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not good.suffix:
            assert not (target / ".metadata").exists()
    load(good, resumed, fresh)
    train(resumed, fresh, [5])
    Snapshot(resumed.parameters(), fresh).assert_equals(Snapshot(model.parameters(), opt))
