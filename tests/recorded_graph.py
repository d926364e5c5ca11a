"""A CUDA graph's rules on the CPU: recording does not run, and a replay reads fixed addresses.

A recording keeps every PyTorch operation with its tensors. A replay runs the same operations on the
same tensors and puts each result where the recorded one was: Python numbers keep their recorded
values, and an exchanged tensor is not noticed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that synchronise with the device.
WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


class Recording(TorchDispatchMode):
    """Records the operations within it; undo() restores the tensors that they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation, and keeps it."""
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
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

    def undo(self) -> None:
        """Restores the values from before the recording."""
        for tensor, before in self._before.values():
            tensor.copy_(before)

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


class Recorder:
    """Stands in for ``tnt_optim.cuda_graphs.record``, and counts."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Records ``run`` without its effects; returns the replay and the results."""
        self.recordings += 1
        recording = Recording()
        with torch.no_grad(), recording:
            reports = run()
        with torch.no_grad():
            recording.undo()

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                recording.replay()

        return replay, reports
