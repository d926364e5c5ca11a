"""For trainers' wrappers that inherit from the optimizer they wrap, as Lightning's and Fabric's do.

Such a wrapper has the methods and defaults of the optimizer's class, but none of its values.
"""

from typing import Any

from torch.optim import Optimizer


class Wrappable:
    """A base class: attributes that a wrapper inherits are read from the wrapped optimizer."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrapper: Any = cls.__bases__[0]
        wraps = isinstance(getattr(wrapper, "optimizer", None), property)
        if not wraps or issubclass(wrapper, Optimizer):
            return
        for name in dir(cls):
            if not (name.startswith("__") or name in vars(cls) or hasattr(wrapper, name)):
                setattr(cls, name, _Forwarded(name))
        for name in ("__getstate__", "__setstate__"):  # a copy of the wrapper has its values
            setattr(cls, name, getattr(_Plain, name))


class _Forwarded:
    """An attribute of the wrapped optimizer, unless the wrapper has one of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.optimizer, self.name)


class _Plain:
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
