"""Two optimizers as one: a Kronecker-factored one for some parameters, another for the rest."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tnt_optim.checkpoint import check_names, warn_of_other_names, with_integer_keys
from tnt_optim.fit import Fit
from tnt_optim.messages import names_of
from tnt_optim.wrappers import Wrappable


def with_fallback(main: Optimizer, fallback: Optimizer) -> "WithFallback":
    """Makes one optimizer of two that have different parameters of a model.

    Embeddings and heads with tens of thousands of rows have large factors; norms and biases gain
    little from factors. For example::

        matrices = [p for p in model.parameters() if p.dim() >= 2 and max(p.shape) <= 4096]
        rest = [p for p in model.parameters() if p.dim() < 2 or max(p.shape) > 4096]
        opt = with_fallback(TNT(matrices), torch.optim.AdamW(rest, lr=1e-3))

    Learning-rate schedulers, ``GradScaler`` and ``torch.distributed.checkpoint`` take it as one;
    ``OneCycleLR`` needs ``cycle_momentum=False`` unless both have a ``momentum``.

    Args:
        main: a ``TNT`` or ``Shampoo``; ``observe``, ``attach``, ``warm_start`` and ``failures`` are
            those of ``main``.
        fallback: any other optimizer; it steps after ``main``.

    Raises:
        ValueError: if a parameter is in both.
        TypeError: if they are not optimizers, or the fallback needs a closure or observations.
    """
    return WithFallback(main, fallback)


class WithFallback(Wrappable, Optimizer):
    """The result of ``with_fallback``. Its parameter groups are those of main, then of fallback.

    Attributes:
        main: the factored optimizer.
        fallback: the other one. A parameter group added to either is also one of this optimizer.
    """

    def __init__(self, main: Optimizer, fallback: Optimizer) -> None:
        for name, optimizer in (("main", main), ("fallback", fallback)):
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"{name} must be an optimizer, got {type(optimizer).__name__}")
        closure = inspect.signature(fallback.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"fallback must step without a closure, got {type(fallback).__name__}, which "
                "computes the loss several times"
            )
        if hasattr(fallback, "observe") and getattr(fallback, "_samples", True):
            raise TypeError(
                f"fallback must not observe outputs, as this {type(fallback).__name__} does: make "
                "it main"
            )
        ours = {p for group in main.param_groups for p in group["params"]}
        both = [p for group in fallback.param_groups for p in group["params"] if p in ours]
        if both:
            raise ValueError(
                f"main and fallback must have no parameter in common, got {len(both)}, the first "
                f"of shape {tuple(both[0].shape)}"
            )
        self.main, self.fallback = main, fallback
        self._fit = Fit()  # the shapes that the fallback's states were made for
        # The fallback's gradients at a step whose update main could not finish.
        self._gradients: dict[Tensor, Tensor | None] = {}
        # States of the fallback that are only allocated: its next step makes new ones.
        self._allocated: dict[Tensor, Any] = {}
        # Schedulers that change the momentum look for it in the defaults.
        has_momentum = all("momentum" in group for group in self.param_groups)
        super().__init__(self.param_groups, {"momentum": 0.0} if has_momentum else {})
        self._others: dict[Any, Any] = {}

    # Groups and states belong to the two optimizers: a scheduler sets them there. Before
    # ``_others`` exists, torch's constructor assigns empty groups and states.

    @property
    def param_groups(self) -> "Groups":
        """The parameter groups of both. A group may be edited; the list may not."""
        return Groups([*self.main.param_groups, *self.fallback.param_groups])

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if "_others" in vars(self) and list(map(id, value)) != list(map(id, self.param_groups)):
            self.param_groups.refuse()

    @property  # type: ignore[override]
    def state(self) -> "States":
        """The states of both; entries under other keys belong to this optimizer."""
        return States(self.main, self.fallback, self._others)

    @state.setter
    def state(self, value: Any) -> None:
        if "_others" in vars(self):
            entries = dict(value)
            self.state.clear()
            self.state.update(entries)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the caller must choose an optimizer.

        Raises:
            ValueError: unless the group is there already.
        """
        if not any(param_group is group for group in self.param_groups):
            raise ValueError("param_group must be added to .main or to .fallback")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step of each.

        Args:
            closure: recomputes the loss, once for both.

        Returns:
            The closure's result, or None.

        Raises:
            RuntimeError, ValueError: from ``main``, or because a parameter's shape has changed;
                neither has then changed anything. Other errors from ``fallback`` come after main's
                step.
        """
        loss, goes_on = self._step_main(closure)
        if goes_on:
            self.fallback.step()
            self._note_states()
        return loss

    @_disable_dynamo  # as main's own step
    def _step_main(self, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Steps main; returns the loss, and whether the fallback's step follows."""
        main: Any = self.main
        asks = getattr(main, "_asks_for_state", None)  # None: main's own step makes its state
        if asks and closure is None and not self.state and asks(self.param_groups):
            self.allocate_state()
            return None, False

        def checked() -> Any:
            """Main's closure, called before anything changes; an error uses up the observations."""
            loss = None if closure is None else closure()
            params, state = self._fallback_params(), self.fallback.state
            self._fit.check(params, state, self._name, lambda param, state: None, {})
            return loss

        if not getattr(main, "has_unfinished_update", False):
            self._gradients = {}
        try:
            loss = main.step(checked)
        except Exception:
            # Main finishes its update at the next call, which has other gradients.
            if getattr(main, "has_unfinished_update", False) and not self._gradients:
                self._gradients = {p: p.grad for p in self._fallback_params()}
                for param in self._gradients:
                    param.grad = None
            raise
        for param, gradient in self._gradients.items():
            param.grad = gradient
        self._gradients = {}
        for param, state in self._allocated.items():
            if self.fallback.state.get(param) is state:
                del self.fallback.state[param]
        self._allocated = {}
        return loss, True

    @_disable_dynamo
    def _note_states(self) -> None:
        self._fit.note_if_new(self._fallback_params(), self.fallback.state)

    def _fallback_params(self) -> list[Tensor]:
        return [p for group in self.fallback.param_groups for p in group["params"]]

    def _name(self, param: Tensor) -> str:
        """What messages call a parameter of the fallback."""
        places = (
            (place, index)
            for place, group in enumerate(self.fallback.param_groups)
            for index, other in enumerate(group["params"])
            if other is param
        )
        place, index = next(places)
        name = names_of(self.fallback.param_groups[place])[index]
        return f"parameter {name!r} of the fallback's group {place}, shape {tuple(param.shape)}"

    @property
    def observing(self) -> bool:
        """See ``TNT.observing``."""
        return bool(getattr(self.main, "observing", False))

    def observe(self, output: Any) -> None:
        """See ``TNT.observe``."""
        self.main.observe(output)  # type: ignore[attr-defined]

    def attach(self, model: nn.Module, output: Callable[..., Any] | None = None) -> RemovableHandle:
        """See ``TNT.attach``."""
        handle: RemovableHandle = self.main.attach(model, output)  # type: ignore[attr-defined]
        return handle

    def warm_start(self, outputs: Iterable[Any], **more: Any) -> None:
        """See ``TNT.warm_start``."""
        self.main.warm_start(outputs, **more)  # type: ignore[attr-defined]

    def allocate_state(self, unreached: Iterable[Tensor] = ()) -> None:
        """Gives both optimizers states to load into; see ``TNT.allocate_state``.

        A parameter's entries that are there already stay as they are.

        Raises:
            RuntimeError: if the fallback cannot make its state; nothing is then changed.
        """
        allocates = hasattr(self.fallback, "allocate_state")
        missing = {} if allocates else _missing_states(self.fallback)
        self.main.allocate_state(unreached)  # type: ignore[attr-defined]
        if allocates:
            self.fallback.allocate_state()  # type: ignore[attr-defined]
        for param, state in missing.items():
            existing = self.fallback.state.get(param, {})
            self.fallback.state[param] = {**state, **existing}
            if not existing:
                self._allocated[param] = self.fallback.state[param]

    def consolidate_state_dict(self, to: int = 0) -> None:
        """See ``TNT.consolidate_state_dict``; a fallback that has this method is called, too."""
        for optimizer in (self.main, self.fallback):
            if hasattr(optimizer, "consolidate_state_dict"):
                optimizer.consolidate_state_dict(to)

    def diagnostics(self) -> dict[str, float]:
        """See ``TNT.diagnostics``; covers the parameters of ``main``."""
        figures: dict[str, float] = self.main.diagnostics()  # type: ignore[attr-defined]
        return figures

    def memory_estimate(self) -> dict[str, Any]:
        """See ``TNT.memory_estimate``; covers the state of ``main``."""
        estimate: dict[str, Any] = self.main.memory_estimate()  # type: ignore[attr-defined]
        return estimate

    def failures(self) -> dict[str, int]:
        """See ``TNT.failures``."""
        counts: dict[str, int] = self.main.failures()  # type: ignore[attr-defined]
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Returns one state of both, in the form of every optimizer's state."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        main, fallback = self.main.state_dict(), self.fallback.state_dict()
        shift = sum(len(group["params"]) for group in main["param_groups"])
        moved = {index + shift: state for index, state in fallback["state"].items()}
        groups = [
            {**group, "params": [index + shift for index in group["params"]]}
            for group in fallback["param_groups"]
        ]
        state_dict = {
            **main,
            "state": {**main["state"], **moved, **self.state.others},
            "param_groups": [*main["param_groups"], *groups],
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the ``state_dict`` of two such optimizers of the same parameters.

        Raises:
            ValueError: if it does not fit; nothing is then changed.
        """
        state_dict = state_dict.copy()  # hooks may change it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = with_integer_keys(state_dict)
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"state_dict must have the key {key!r}, got {sorted(state_dict)}")
        wanted = [len(group["params"]) for group in self.param_groups]
        got = [len(group["params"]) for group in state_dict["param_groups"]]
        if got != wanted:
            raise ValueError(
                f"state_dict must have parameter groups of {wanted} parameters, got {got}"
            )
        first = len(self.main.param_groups)
        parts = []
        for groups in (state_dict["param_groups"][:first], state_dict["param_groups"][first:]):
            indices = {index for group in groups for index in group["params"]}
            state = {i: s for i, s in state_dict["state"].items() if i in indices}
            parts.append({"state": state, "param_groups": groups})
        known = {index for group in state_dict["param_groups"] for index in group["params"]}
        others = {key: s for key, s in state_dict["state"].items() if key not in known}
        check_names(self.param_groups, state_dict)
        names = [group.get("param_names") for group in self.fallback.param_groups]
        before = self.fallback.state_dict()
        self.fallback.load_state_dict(parts[1])
        try:
            # The other entries are main's. It checks before it changes anything.
            self.main.load_state_dict({**state_dict, **parts[0]})
        except Exception:
            self.fallback.load_state_dict(before)
            raise
        warn_of_other_names(names, parts[1]["param_groups"])
        for group, group_names in zip(self.fallback.param_groups, names, strict=True):
            if group_names is not None:
                group["param_names"] = group_names
        self.state.others.update(others)
        self._fit.note(self._fallback_params(), self.fallback.state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("main", "fallback", "defaults", "_others", "_fit", "_allocated")
        return {**{name: getattr(self, name) for name in names}, "_gradients": {}}

    def __repr__(self) -> str:
        return f"{self.main!r}\nwith the fallback {self.fallback!r}"


def _missing_states(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """First states of an optimizer's parameters, from steps of copies with zero gradients.

    The optimizer, its parameters and gradients do not change, and no hook runs. Parameters without
    entries are left out.
    """
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    states: dict[Tensor, dict[str, Any]] = {}
    devices = {p.device for p, _ in params if p.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        for param, group in params:
            if param.requires_grad and (state := _first_state(optimizer, param, group)):
                states[param] = state
    return states


def _first_state(optimizer: Optimizer, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """The state of one parameter of an optimizer before its first step: moments of zero."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    copied = torch.zeros_like(param).requires_grad_()
    copied.grad = copied.to_sparse() if sparse else torch.zeros_like(param)
    twin = object.__new__(type(optimizer))
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    groups = [{**group, "params": [copied]}]
    vars(twin).update({**vars(optimizer), "state": state, "param_groups": groups})
    step = type(optimizer).step
    try:
        getattr(step, "__wrapped__", step)(twin)  # torch's wrapper runs the hooks
    except Exception as error:
        made_earlier = isinstance(error, KeyError) and optimizer.state.get(param)
        if made_earlier:  # by the constructor, as in Adagrad
            return {}
        raise RuntimeError(
            "allocate_state() must make the fallback's state by a step with zero gradients, and "
            f"{type(optimizer).__name__} raised {error!r}: load its state without allocate_state()"
        ) from error
    if "step" in state[copied]:
        state[copied]["step"] = 0 * state[copied]["step"]
    return state[copied]


class Groups(list[dict[str, Any]]):
    """The parameter groups of two optimizers. The list cannot be changed: it belongs to both."""

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises a ValueError, as every change of the list does."""
        raise ValueError(
            "param_groups must be changed in .main.param_groups or .fallback.param_groups: those "
            "of with_fallback are a new list of both optimizers' groups"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = refuse

    def __reduce__(self) -> Any:  # a copy is a plain list
        return list, (list(self),)


class States(MutableMapping[Any, Any]):
    """The states of two optimizers as one mapping.

    Attributes:
        others: entries under keys that are not parameters of either.
    """

    def __init__(self, main: Optimizer, fallback: Optimizer, others: dict[Any, Any]) -> None:
        self.others = others
        self._parts = [
            ({p for group in optimizer.param_groups for p in group["params"]}, optimizer.state)
            for optimizer in (main, fallback)
        ]

    def _mapping_of(self, key: Any) -> MutableMapping[Any, Any]:
        """The mapping that has the entry of a key, or would get it."""
        for params, state in self._parts:
            if key in state or key in params:
                return state
        return self.others

    def __getitem__(self, key: Any) -> Any:
        return self._mapping_of(key)[key]

    # The inherited methods use [key], which adds an entry to an optimizer's state.

    def __contains__(self, key: Any) -> bool:
        return key in self._mapping_of(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """See ``dict.get``."""
        return self._mapping_of(key).get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """See ``dict.pop``."""
        return self._mapping_of(key).pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """See ``dict.setdefault``."""
        return self._mapping_of(key).setdefault(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mapping_of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._mapping_of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for _, state in self._parts:
            yield from state
        yield from self.others

    def __len__(self) -> int:
        return sum(len(state) for _, state in self._parts) + len(self.others)
