"""Functions that run in several processes at once, with gloo, and what each returns."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_in(processes: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls a function in processes that can reach each other, one thread each.

    Args:
        processes: how many.
        function: of a module; called as ``function(rank, processes, *arguments)``.
        arguments: can be pickled.

    Returns:
        What each process returned, by rank; loadable with ``torch.load(weights_only=False)``.

    Raises:
        ProcessRaisedException: where one raises; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (processes, folder, function, arguments), nprocs=processes)
        paths = [Path(folder) / f"{rank}.pt" for rank in range(processes)]
        return [torch.load(path, weights_only=False) for path in paths]


def _run(
    rank: int, processes: int, folder: str, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    torch.save(function(rank, processes, *arguments), f"{folder}/{rank}.pt")
    leave(store, rank, processes)


def leave(store: dist.Store, rank: int, processes: int) -> None:
    """Ends a process once none talks to it any more.

    Without taking anything down: gloo's threads abort the interpreter's end now and then
    ("terminate called without an active exception").
    """
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(processes)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
