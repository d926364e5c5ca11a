"""Functions that run in several processes at once, with gloo, and what each returns.

The processes start once for all tests of a run that want as many.
"""

import functools
import gc
import io
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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
        RuntimeError: where one raises or dies; the others are ended.
    """
    ranks = _started(processes)
    try:
        return ranks.call(function, arguments)
    except BaseException:
        _started.cache_clear()
        ranks.end()
        raise


class _Ranks:
    """Processes that wait for functions to call."""

    def __init__(self, processes: int) -> None:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(processes)]
        self.ends = [end for end, _ in pipes]
        self.folder = tempfile.TemporaryDirectory()
        self.processes = [
            context.Process(
                target=_serve, args=(rank, processes, self.folder.name, end), daemon=True
            )
            for rank, (_, end) in enumerate(pipes)
        ]
        for process, (_, end) in zip(self.processes, pipes, strict=True):
            process.start()
            end.close()  # so that a process that dies closes its pipe

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """The results by rank; raises the first error, whatever the other processes wait for."""
        for end in self.ends:
            end.send((function, arguments))
        found: dict[int, Any] = {}
        while len(found) < len(self.ends):
            for end in wait([end for n, end in enumerate(self.ends) if n not in found]):
                rank = self.ends.index(end)  # type: ignore[arg-type]
                try:
                    error, content = self.ends[rank].recv()
                except EOFError:
                    raise RuntimeError(f"process {rank} has died") from None
                if error:
                    raise RuntimeError(f"in process {rank}:\n{error}")
                found[rank] = torch.load(io.BytesIO(content), weights_only=False)
        return [found[rank] for rank in range(len(found))]

    def end(self) -> None:
        """Ends all processes, wherever they are."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


_started = functools.cache(_Ranks)


def _serve(rank: int, processes: int, folder: str, calls: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    while True:
        try:
            function, arguments = calls.recv()
        except EOFError:
            # gloo's threads now and then abort an interpreter that ends in the usual way.
            os._exit(0)
        gc.collect()  # cycles of the last call may hold models and process groups
        torch.manual_seed(0)
        content, error = io.BytesIO(), ""
        try:
            torch.save(function(rank, processes, *arguments), content)
        except BaseException:
            error = traceback.format_exc()
        calls.send((error, content.getvalue()))
