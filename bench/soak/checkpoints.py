"""The checkpoints of a soak: one folder each, of which ``.metadata`` is written last."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import save as save_in_parts

from bench.soak.training import Training

KEPT = 2
_NAME = "after-"


class Diary:
    """What has happened to the training that a checkpoint holds, whatever was taken back since.

    Attributes:
        taken: how often each step was taken.
        left_out: by step, whose part of the batch the statistics lack: of how many processes
            (0: nobody's), and which.
    """

    def __init__(self, steps: int) -> None:
        self.taken = torch.zeros(steps, dtype=torch.int64)
        self.left_out = torch.zeros(steps, 2, dtype=torch.int64)

    def tensors(self) -> dict[str, Tensor]:
        """To be saved, or loaded into."""
        return {"taken": self.taken, "left_out": self.left_out}


def folder_of(work: Path, step: int) -> Path:
    """The folder of the checkpoint after so many steps."""
    return work / f"{_NAME}{step:07d}"


def complete(work: Path) -> list[Path]:
    """The folders of complete checkpoints, oldest first."""
    return [f for f in sorted(work.glob(f"{_NAME}*")) if (f / ".metadata").exists()]


def steps_of(folder: Path) -> int:
    """After how many steps a checkpoint was made."""
    return int(folder.name.removeprefix(_NAME))


def remove_incomplete(work: Path) -> int:
    """Removes what killed processes have left, before any new one starts; returns how many."""
    whole = complete(work)
    broken = [f for f in work.glob(f"{_NAME}*") if f not in whole]
    for folder in broken:
        shutil.rmtree(folder)
    return len(broken)


def save(training: Training, diary: Diary, work: Path, step: int, rank: int) -> None:
    """Writes a checkpoint, in all processes at once; the first then removes old ones."""
    save_in_parts(_content(training, diary), checkpoint_id=folder_of(work, step))
    if rank == 0:
        for folder in complete(work)[:-KEPT]:
            (folder / ".metadata").unlink()  # first, or half a folder could look like a whole one
            shutil.rmtree(folder)


def load(training: Training, diary: Diary, folder: Path) -> None:
    """Loads a checkpoint of however many processes."""
    training.opt.allocate_state()
    content = _content(training, diary)
    load_in_place(content, checkpoint_id=folder)
    training.net.load_state_dict(content["net"])
    training.opt.load_state_dict(content["opt"])


def _content(training: Training, diary: Diary) -> dict[str, Any]:
    return {
        "net": training.net.state_dict(),
        "opt": training.opt.state_dict(),
        "diary": diary.tensors(),
    }
