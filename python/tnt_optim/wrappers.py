"""Trainers' wrappers that inherit from the optimizer that they wrap, as Lightning's and Fabric's.

Such a wrapper has the methods and defaults of the optimizer's class, but none of its values.
"""

from typing import Any


class Wrappable:
    """A base of optimizers: what a wrapper inherits from one, it takes from the wrapped one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrapper = cls.__bases__[0]
        if isinstance(getattr(wrapper, "optimizer", None), property):
            for name in dir(cls):
                if not (name.startswith("__") or hasattr(wrapper, name)):
                    setattr(cls, name, _of_the_wrapped(name))


def _of_the_wrapped(name: str) -> property:
    return property(
        lambda wrapper: getattr(wrapper.optimizer, name),
        lambda wrapper, value: setattr(wrapper.optimizer, name, value),
    )
