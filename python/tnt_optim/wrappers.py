"""Trainers' wrappers that inherit from the optimizer that they wrap, as Lightning's and Fabric's.

Such a wrapper has the methods and defaults of the optimizer's class, but none of its values.
"""

from typing import Any

from torch.optim import Optimizer


class Wrappable:
    """A base of optimizers: what a wrapper inherits from one, it takes from the wrapped one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrapper: Any = cls.__bases__[0]
        wraps = isinstance(getattr(wrapper, "optimizer", None), property)
        if not wraps or issubclass(wrapper, Optimizer):
            return
        for name in dir(cls):
            if not (name.startswith("__") or name in vars(cls) or hasattr(wrapper, name)):
                setattr(cls, name, _OfTheWrapped(name))
        for name in ("__getstate__", "__setstate__"):  # copies of the wrapper, not the optimizer's
            setattr(cls, name, getattr(_Plain, name))


class _OfTheWrapped:
    """An attribute of the wrapped optimizer, unless the wrapper has one of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.optimizer, self.name)


class _Plain:
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
