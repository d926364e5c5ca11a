"""What the Kronecker-factored optimizers share: modes, state, schedule and step.

What a parameter's state holds is in ``states``. The state of a parameter exists whole or not at
all: its first statistic brings the factors and a zero momentum with it.

At step t = 0, 1, 2, ..., with T1 = stat_interval and T2 = inverse_interval: statistics at
t % T1 == 0; factors at t % T2 == 0, and at every statistics step in the first T2 steps, while the
statistics are young; the update at every step.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tnt_kernels import gram_ema_
from tnt_optim.checkpoint import check_method, check_state_dict, copied_states, load_adapted
from tnt_optim.device_step import (
    Batch,
    DeviceStep,
    Group,
    Report,
    Settings,
    by_device,
    worst_of_blocks,
)
from tnt_optim.failures import Failures, PreconditionerError
from tnt_optim.gradients import (
    all_finite,
    buffers_put_back,
    check_reached,
    check_scalar_loss,
    gradients_of,
)
from tnt_optim.graphs import StepGraphs, check_graphs_device
from tnt_optim.processes import Team, check_static_graph, pooled, replicas_behind, team_of
from tnt_optim.settings import check_settings
from tnt_optim.sharing import SHARDS, Owners, Sharing, send_factors
from tnt_optim.states import (
    COUNTS,
    MOMENTS,
    State,
    blocks,
    layout,
    new_state,
    rows,
    state_dtype,
    zero_statistics,
)


class KroneckerOptimizer(Optimizer):
    """Base of the optimizers that precondition the momentum, mode by mode.

    A subclass says what the factors are (``_factors``), and where the gradients for the statistics
    come from: by default they are the parameters' own.
    """

    # What a saved state says it is of: the method, whatever a subclass of it is called.
    _method = "Kronecker-factored"
    # What is set for the optimizer as a whole.
    _shared: tuple[str, ...] = ("capturable", "process_group", "shard")

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        capturable: bool = False,
        process_group: Any = None,
        shard: str | None = None,
    ) -> None:
        if not isinstance(capturable, bool):
            raise ValueError(f"capturable must be True or False, got {capturable!r}")
        if shard not in SHARDS:
            known = ", ".join(repr(name) for name in SHARDS)
            raise ValueError(f"shard must be one of {known}, got {shard!r}")
        self.capturable = capturable
        self.process_group = process_group
        self.shard = shard
        self._owners = Owners()
        self._graphs = StepGraphs()
        self._failures = Failures()
        super().__init__(params, {**defaults, "modes": None, "step": 0})

    # What a subclass provides.

    def _factors(
        self,
        group: Settings,
        stats: Sequence[Sequence[Tensor]],
        out: Sequence[Sequence[Tensor]] | None = None,
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Makes the factors of ``stats``; see ``tnt_kernels.damped_inverse`` for out and info."""
        raise NotImplementedError

    def _statistic_gradients(self, team: Team | None) -> dict[Tensor, Tensor]:
        """Returns the gradients whose statistics are due at this step, by parameter.

        The same in all processes of the team.
        """
        return {
            p: p.grad
            for group in self.param_groups
            for due in [self._statistics_due(group)]
            for p in group["params"]
            if p.grad is not None and (due or not self._has_state(p))
        }

    def _statistic_loss(self, output: Any, index: int, team: Team | None) -> Tensor:
        """Turns what ``warm_start`` was given for batch ``index`` into a scalar with a graph."""
        return check_scalar_loss("outputs (here: training losses)", output)

    def _may_wait(self, param: Tensor) -> bool:
        """Whether a parameter without statistics sits a step out, rather than being an error."""
        return False

    def _note_unreached(self) -> None:
        """Called when a step has gone well, before its observations are forgotten."""

    def _forget_observations(self) -> None:
        """Called when a step is through with its observations, or has raised."""

    # The public side.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step.

        Args:
            closure: recomputes the loss, calls ``backward`` (and ``observe``), returns the loss.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: where a group's settings have become wrong; nothing is then changed.
            RuntimeError: where a parameter has a gradient but no statistics; nothing is then
                changed. (One that the outputs observed so far did not reach, but this step's loss
                does, waits for the next ``observe`` instead.)
            PreconditionerError: where first statistics or inverses fail, or later ones repeatedly.
                No parameter is then changed.

        A step that raises has used up what was observed for it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for group in self.param_groups:
                check_settings(group)  # anyone may have changed them since
            team = self._team()
            # On a GPU a report may arrive here and not yet there, and where it stops the training
            # it must stop all processes. It is a step old: hardly ever is there anything to wait.
            self._failures.read(self.state, self._name, wait=team is not None)
            observed = self._statistic_gradients(team)
            updates = [self._to_update(group, observed) for group in self.param_groups]
            first = {p: g for p, g in observed.items() if not self._has_state(p)}
            self.state.update(self._first_states(first))
            if first:
                observed = {p: g for p, g in observed.items() if p not in first}
            self._run(self._device_step(observed, first, updates))
            self._note_unreached()
        finally:
            self._forget_observations()
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def warm_start(self, outputs: Iterable[Any], *, model: nn.Module | None = None) -> None:
        """Starts the statistics from their plain average over many batches, and the factors too.

        Best over the whole data set at the initial weights, as in the paper:
        ``opt.warm_start((model(x) for x, _ in batches), model=model)``. Statistics that exist
        already start over.

        Args:
            outputs: for each batch, with its graph: what ``observe`` takes, or, where the
                statistics come from the training gradients themselves, the training loss.
            model: if given, its buffers (batch norm's running statistics) are put back afterwards.

        Raises:
            ValueError: where there is no batch, or an output does not fit; nothing is then changed.
            PreconditionerError: where no batch gave a finite gradient, or a factor could not be
                made; nothing is then changed.
        """
        if not isinstance(outputs, Iterable):
            raise TypeError(f"outputs must be iterable, got {type(outputs).__name__}")
        with buffers_put_back(*([] if model is None else [model])):
            stats, skipped = self._average_statistics(outputs)
        fresh = self._states(stats)
        self._failures = Failures()
        for param, state in fresh.items():
            state["skipped_statistics"] = skipped
            earlier = self.state.get(param, {})
            for key in earlier.keys() & state.keys() & set(MOMENTS):
                state[key] = earlier[key].reshape(state[key].shape)  # its modes may have changed
            state.update({key: earlier[key] for key in COUNTS & earlier.keys()})
            self.state[param] = state

    def failures(self) -> dict[str, int]:
        """Returns how often statistics were left out and inverses failed; waits for the device.

        "skipped_statistics" counts the refreshes left out because a gradient was not finite (of the
        parameter that lost most), "failed_inverses" the failed refreshes of all parameters.
        """
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        states = [state for state in self.state.values() if state]
        skipped = [state["skipped_statistics"] for state in states]
        failed = [state["failed_inverses"] for state in states]
        return {"skipped_statistics": max(skipped, default=0), "failed_inverses": sum(failed)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with settings of their own; they join at the optimizer's present step.

        Raises:
            ValueError: where a setting or a parameter does not fit; nothing is then added.
        """
        for name in self._shared:
            if name in param_group:
                raise ValueError(f"{name} cannot be set for a parameter group, only for all")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            for param in group["params"]:
                if not param.is_floating_point() or param.layout != torch.strided:
                    raise ValueError(
                        f"params must be dense real floating-point tensors, got {param.dtype}, "
                        f"{param.layout} for {self._name(param)}"
                    )
                layout(param, group)
                if self.capturable:
                    check_graphs_device(param, self.param_groups[0]["params"][:1])
        except Exception:
            self.param_groups.pop()
            raise
        group["step"] = self.param_groups[0]["step"]

    def state_dict(self) -> dict[str, Any]:
        """Returns state and settings, loadable with ``torch.load(weights_only=True)``.

        To be taken between steps. ``modes`` functions are left out: who loads it has their own.
        """
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            del group["modes"]
        return {**state_dict, "method": self._method}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, of an optimizer of the same parameters.

        Hooks before it (``register_load_state_dict_pre_hook``) may adapt it to the parameters.

        Raises:
            ValueError: where it is of another optimizer, other parameters, or other kinds of modes
                (full or diagonal); nothing is then changed.
        """
        functions = [group["modes"] for group in self.param_groups]

        def check(adapted: dict[str, Any]) -> None:
            check_method(self._method, adapted)
            check_state_dict(self.param_groups, adapted, set(self.defaults))

        def finish(adapted: dict[str, Any]) -> None:
            self._failures, self._graphs = Failures(), StepGraphs()
            for group, modes in zip(self.param_groups, functions, strict=True):
                group["modes"] = modes
            for param, state in copied_states(self.param_groups, adapted, state_dtype):
                self._count_again(state, param)
                self.state[param] = state

        load_adapted(self, state_dict, super().load_state_dict, check, finish)

    def __getstate__(self) -> dict[str, Any]:
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        own = {
            "_failures": self._failures,
            "capturable": self.capturable,
            "shard": self.shard,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._graphs = StepGraphs()
        if "shard" in state:  # a copy, in the default group: a process group cannot be copied
            self.process_group, self._owners = None, Owners()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            params = group["params"]
            largest = group["max_factor_dim"]
            shapes = [s for p in params for s in layout(p, group).statistic_shapes(largest)]
            full = sum(len(shape) == 2 for shape in shapes)
            lines.append(
                f"  group {number}: {len(params)} parameters, "
                f"{sum(p.numel() for p in params):,} numbers, {full} full and "
                f"{len(shapes) - full} diagonal modes"
            )
            settings = sorted(set(group) - {"params", "param_names"})
            lines += [f"    {key}: {group[key]}" for key in settings]
        return "\n".join([*lines, ")"])

    # Statistics and factors.

    def _statistics_due(self, group: dict[str, Any]) -> bool:
        return bool(group["step"] % group["stat_interval"] == 0)

    def _average_statistics(self, outputs: Iterable[Any]) -> tuple[dict[Tensor, list[Tensor]], int]:
        """The plain average over batches, and how many were left out for not being finite."""
        trainable = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        stats: dict[Tensor, list[Tensor]] = {}
        batches = skipped = 0
        for observed in self._batch_gradients(outputs, trainable):
            if not all_finite(observed.values()):
                skipped += 1
                continue
            observed.update({p: torch.zeros_like(p) for p in stats if p not in observed})
            self._blend(stats, observed, batches / (batches + 1))
            batches += 1
        if skipped and not batches:
            raise PreconditionerError(f"outputs: none of {skipped} batches gave a finite gradient")
        if not batches:
            raise ValueError("outputs must hold at least one batch, got none")
        return stats, skipped

    def _batch_gradients(
        self, outputs: Iterable[Any], trainable: Sequence[Tensor]
    ) -> Iterator[dict[Tensor, Tensor]]:
        """The gradient for the statistics of each batch, the parts of all processes together."""
        team, batches = self._team(), iter(outputs)
        for index in itertools.count():
            output, observed = next(batches, _NO_MORE), {}
            if output is not _NO_MORE:
                loss = self._statistic_loss(output, index, team)
                check_static_graph(replicas_behind(loss))
                observed = gradients_of(loss, trainable, retain_graph=False)
                check_reached(observed)
            if team is None:
                if output is _NO_MORE:
                    return
                yield observed
                continue
            has_more = output is not _NO_MORE
            flags = [has_more, *(p in observed for p in trainable)]
            anyone, *reached = team.anywhere(flags, trainable[0].device)
            if not anyone:
                return
            params = [p for p, is_reached in zip(trainable, reached, strict=True) if is_reached]
            yield pooled(team, params, observed, int(has_more))[0]

    def _blend(
        self,
        stats: dict[Tensor, list[Tensor]],
        observed: Mapping[Tensor, Tensor],
        decay: float,
    ) -> None:
        """Blends gradients into statistics that are no state's yet, those that this process has.

        A parameter of which another process has them gets an empty list.
        """
        sharing = self._sharing()
        for group, params in self._batches(observed):
            for param in params:
                if param not in stats:
                    owned = sharing is None or sharing.owned([param])
                    stats[param] = zero_statistics(param, group) if owned else []
            own = [p for p in params if stats[p]]
            seen = [layout(p, group) for p in own]
            gradients = blocks([observed[p] for p in own], seen)
            gram_ema_(rows([stats[p] for p in own], seen), gradients, decay)

    def _first_states(self, observed: dict[Tensor, Tensor]) -> dict[Tensor, State]:
        """States from a first observation. Waits for it: there is nothing else to go on with."""
        if observed and not all_finite(observed.values()):
            raise PreconditionerError(
                "the first gradient for the statistics is not finite: there are no earlier "
                f"statistics to go on with, for {self._name(next(iter(observed)))}"
            )
        stats: dict[Tensor, list[Tensor]] = {}
        self._blend(stats, observed, 0.0)
        return self._states(stats)

    def _states(self, stats: dict[Tensor, list[Tensor]]) -> dict[Tensor, State]:
        """Whole states around first statistics. Waits for the factors, as above."""
        states: dict[Tensor, State] = {}
        sharing = self._sharing()
        for group, params in self._batches(stats):
            own = [p for p in params if stats[p]]
            seen = [layout(p, group) for p in own]
            made, info = self._factors(group, rows([stats[p] for p in own], seen))
            codes = worst_of_blocks(info, [look.count for look in seen])
            if sharing is not None:
                codes = sharing.codes(params, own, codes)
            for param, code in zip(params, codes.tolist(), strict=True):
                if code != 0:
                    name = self._name(param)
                    raise self._failures.first_inverse(code, name, group["damping"])
            rest = iter(made)
            factors = {
                p: [f for _ in range(look.count) for f in next(rest)]
                for p, look in zip(own, seen, strict=True)
            }
            for param in params:
                states[param] = self._new_state(group, param, stats[param], factors.get(param))
            if sharing is not None and sharing.shard == "inverses":
                send_factors(sharing, params, states)
        return states

    def _new_state(
        self, group: Group, param: Tensor, stats: list[Tensor], factors: list[Tensor] | None
    ) -> State:
        """What this process keeps of a parameter, with the statistics and factors that it made."""
        alone = self._sharing() is None or bool(stats)
        if factors is None and self.shard == "inverses":
            factors = zero_statistics(param, group)  # until the owner's arrive
        moments = alone or self.shard != "directions"
        state = new_state(param, group, stats or None, factors, moments=moments)
        self._count_again(state, param)
        return state

    def _device_step(
        self,
        observed: dict[Tensor, Tensor],
        first: Mapping[Tensor, Tensor],
        updates: Sequence[list[Tensor]],
    ) -> DeviceStep:
        """What the step has to do: blend what was observed, remake factors, update."""
        due = [self._factors_due(group, observed, first) for group in self.param_groups]
        moving = [p for params in updates for p in params]
        return DeviceStep(
            blended=list(self._batches(observed)),
            remade=self._split(due),
            updated=self._split(updates),
            observed=observed,
            grads={p: p.grad for p in moving if p.grad is not None},
            sharing=self._sharing(),
        )

    def _split(self, params: Sequence[list[Tensor]]) -> list[Batch]:
        """Parameters by group, split by device."""
        pairs = zip(self.param_groups, params, strict=True)
        return [(group, batch) for group, members in pairs for batch in by_device(members)]

    def _run(self, step: DeviceStep) -> None:
        if self.capturable:
            self._report(self._graphs.run(step, self.state, self._whole))
            return
        self._report(self._refresh(step, _as_they_are))
        if self._team() is None or not any(p.is_cuda for p in step.grads):
            self._failures.read(self.state, self._name)
        step.update(self.state, _as_they_are)

    def _whole(self, step: DeviceStep, settings: Callable[[Group], Settings]) -> list[Report]:
        reports = self._refresh(step, settings)
        step.update(self.state, settings)
        return reports

    def _refresh(self, step: DeviceStep, settings: Callable[[Group], Settings]) -> list[Report]:
        def make(group: Settings, stats: list[list[Tensor]], out: list[list[Tensor]]) -> Tensor:
            return self._factors(group, stats, out)[1]

        return step.blend(self.state, settings) + step.remake(self.state, settings, make)

    def _report(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if report.kind == "statistics":
                self._failures.report_statistics(report.codes, report.params)
            else:
                self._failures.report_inverses(report.codes, report.params)

    def _factors_due(
        self,
        group: dict[str, Any],
        observed: Mapping[Tensor, Tensor],
        first: Mapping[Tensor, Tensor],
    ) -> list[Tensor]:
        """The group's parameters whose factors are to be remade; the first ones just were made."""
        t, interval = group["step"], group["inverse_interval"]
        if t % interval == 0:
            return [p for p in group["params"] if self._has_state(p) and p not in first]
        if not observed:
            return []
        return [
            p
            for p in group["params"]
            if p in observed and t - self.state[p]["first_step"] < interval
        ]

    # The update.

    def _to_update(self, group: dict[str, Any], observed: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """The group's parameters that this step moves."""
        ready = []
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {self._name(param)} must be dense, got {param.grad.layout}"
                )
            known = self._has_state(param)
            if not known and param not in observed:
                if self._may_wait(param):
                    continue
                raise RuntimeError(
                    f"step() has no statistics for {self._name(param)}, which has a gradient: call "
                    "observe(output) between the forward and step(), or warm_start() before "
                    "training, with outputs that depend on every parameter the loss depends on"
                )
            state = self.state[param] if known else {}
            if known and group["graft"] == "adam" and "second_moment_updates" not in state:
                raise RuntimeError(
                    "graft='adam' must be set before the first statistics: "
                    f"{self._name(param)} has no second moment"
                )
            ready.append(param)
        return ready

    # Processes.

    def _team(self) -> Team | None:
        team = team_of(self.process_group)
        if team is not None and self.capturable:
            raise RuntimeError(
                "capturable=True works in a single process, and torch.distributed runs "
                f"{team.size}: leave it off"
            )
        return team

    def _sharing(self) -> Sharing | None:
        team = self._team()
        if team is None or self.shard is None:
            return None
        moments = self.shard == "directions"

        def owner(param: Tensor) -> int:
            return self._owners.of(param, self.param_groups, team.size, moments)

        return Sharing(team, self.shard, owner)

    # Parameters and their modes.

    def _has_state(self, param: Tensor) -> bool:
        # Not `in`: looking at opt.state[param] leaves an empty dictionary behind.
        return bool(self.state.get(param))

    def _batches(self, params: Iterable[Tensor]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """The given parameters by group and device: what one call of an operator can serve."""
        wanted = params if isinstance(params, Mapping) else set(params)
        for group in self.param_groups:
            for batch in by_device([p for p in group["params"] if p in wanted]):
                yield group, batch

    def _count_again(self, state: State, param: Tensor) -> None:
        """Turns counts into tensors where CUDA graphs go on counting."""
        for key in COUNTS & state.keys():
            state[key] = self._count(state[key], param)

    def _count(self, number: int | float | Tensor, param: Tensor) -> int | Tensor:
        """How often something was updated; a tensor where a CUDA graph goes on counting."""
        if self.capturable:
            return torch.full((), float(number), dtype=torch.float64, device=param.device)
        return int(number)

    def _name(self, param: Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param:
                    name = repr(group["param_names"][index]) if "param_names" in group else index
                    return f"parameter {name} of group {number}, shape {tuple(param.shape)}"
        raise KeyError("not a parameter of this optimizer")


def _as_they_are(group: Group) -> Settings:
    return group


_NO_MORE = object()
