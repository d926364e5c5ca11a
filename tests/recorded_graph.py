"""CUDA graphs, devices and streams on the CPU: a recording does not run, a replay reads addresses.

A recording keeps every PyTorch operation with its tensors. A replay runs the same operations on the
same tensors and puts each result where the recorded one was: Python numbers keep their recorded
values, and an exchanged tensor is not noticed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that synchronise with the device.
WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


class Recording(TorchDispatchMode):
    """Records the operations within it; undo() restores the tensors that they wrote."""

    def __init__(self, before_each: Callable[[str], bool]) -> None:
        """``before_each`` gets an operation's name and says whether it is recorded, or else run."""
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._before_each = before_each

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation, and keeps it."""
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if not self._before_each(name):
            return func(*args, **kwargs)
        assert name not in WAITING, f"{func} waits for the device"
        for place, schema in enumerate(func._schema.arguments):
            if schema.alias_info is not None and schema.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(schema.name)
                for tensor in tree_leaves(value):
                    self._before.setdefault(id(tensor), (tensor, tensor.clone()))
        result = func(*args, **kwargs)
        results = _listed(result)
        fresh = [schema.alias_info is None for schema in func._schema.returns]
        if len(fresh) == 1:
            fresh *= len(results)
        kept = [r if new else None for r, new in zip(results, fresh, strict=True)]
        self.calls.append((func, args, kwargs, kept))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        """Restores the values from before the recording."""
        for tensor, before in self._before.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the operations again, on the recorded tensors."""
        for func, args, kwargs, kept in self.calls:
            for new, old in zip(_listed(func(*args, **kwargs)), kept, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


def _listed(result: Any) -> Sequence[Any]:
    if result is None:
        return []
    return result if isinstance(result, tuple | list) else [result]


@dataclass(eq=False)
class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    device: int


class Recorder:
    """Stands in for the devices, streams and graphs of ``torch.cuda``, and counts.

    All tensors count as on one device; their operations are on its current stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recordings = self.replays = 0
        self.device = 0  # of the tensors
        self.refused: set[str] = set()  # operations that break a recording
        self.refuses_late = False  # at the end of the recording, not at once
        self.current = 0  # device
        self.streams = {device: Stream(device) for device in range(2)}  # the current ones
        self._default: Stream | None = None
        self._stands_in = {
            "CUDAGraph": lambda: Graph(self),
            "graph": self._recorded,
            "device": self._on_device,
            "Stream": lambda: Stream(self.current),
            "current_stream": lambda device=None: self.streams[self._index(device)],
            "set_stream": self._set_stream,
        }
        for name, value in self._stands_in.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def place(self) -> tuple[int, list[Stream]]:
        """The current device, and the current stream of every device."""
        return self.current, list(self.streams.values())

    def _index(self, device: torch.device | None) -> int:
        return self.current if device is None else self.device

    def _set_stream(self, stream: Stream) -> None:
        self.current, self.streams[stream.device] = stream.device, stream

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, self._index(device)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _recorded(
        self, graph: "Graph", stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """As ``torch.cuda.graph``: one stream of its own, which is left current after an error."""
        if stream is None:
            stream = self._default = self._default or Stream(self.current)
        before, streams = self.current, dict(self.streams)
        self._set_stream(stream)
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
            self.current, self.streams = before, streams


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recording = Recording(self._is_recorded)
        self._broken = False

    def capture_begin(self) -> None:
        """Records what follows on the current stream."""
        self._recorder.recordings += 1
        self._stream = self._recorder.streams[self._recorder.current]
        self._recording.__enter__()

    def capture_end(self) -> None:
        """Ends the recording, whose effects are undone."""
        self._recording.__exit__(None, None, None)
        self._recording.undo()
        if self._broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        """Runs what was recorded."""
        self._recorder.replays += 1
        self._recording.replay()

    def _is_recorded(self, name: str) -> bool:
        recorder = self._recorder
        if recorder.streams[recorder.device] is not self._stream:
            return False
        if name in recorder.refused:
            self._broken = True
            if not recorder.refuses_late:
                raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        return True
