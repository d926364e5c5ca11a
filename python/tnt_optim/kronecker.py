"""Schedule, step and saved state that the Kronecker-factored optimizers share.

At step t = 0, 1, 2, ..., with T1 = stat_interval and T2 = inverse_interval: statistics at
t % T1 == 0; factors at t % T2 == 0, and at every statistics step in the first T2 steps, while the
statistics are young; the update at every step.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tnt_optim.checkpoint import (
    check_method,
    check_state_dict,
    copied_states,
    load_adapted,
    with_integer_keys,
)
from tnt_optim.cuda_graphs import StepGraphs
from tnt_optim.diagnostics import diagnostics
from tnt_optim.directions import Workspace
from tnt_optim.distributed.process_group import Gradients, Team
from tnt_optim.distributed.replicated import Owners
from tnt_optim.failures import Failures, PreconditionerError
from tnt_optim.options import ADDED, as_number, check_settings
from tnt_optim.state import TENSORS, is_half, layout, state_dtype
from tnt_optim.statistics import FactoredOptimizer
from tnt_optim.update import (
    Batch,
    DeviceStep,
    Group,
    Report,
    Settings,
    by_device,
)


class KroneckerOptimizer(FactoredOptimizer):
    """Base of the optimizers that precondition the momentum, mode by mode.

    A subclass says what the factors are (``_factors``), and where the gradients for the statistics
    come from: by default they are the parameters' own.
    """

    # What a saved state says it is of: the method, whatever a subclass of it is called.
    _method = "Kronecker-factored"

    def __init__(self, params: Any, defaults: dict[str, Any], **shared: Any) -> None:
        self._graphs, self._workspace = StepGraphs(), Workspace()
        # Whose statistics have what was observed for this step, where an attempt at it raised.
        self._taken: set[Tensor] = set()
        super().__init__(params, defaults, **shared)

    # What a subclass provides.

    def _statistic_gradients(self, team: Team | None, moving: Container[Tensor]) -> Gradients:
        """Returns the gradients whose statistics are due at this step, by parameter.

        Of the same parameters in all processes of the team. Of sharded ones they are pieces.

        Args:
            team: the processes.
            moving: the parameters that have a gradient of the loss.
        """
        return {
            p: p.grad
            for group in self.param_groups
            for due in [self._statistics_due(group)]
            for p in group["params"]
            if p in moving and (due or not self._has_state(p))
        }

    def _may_wait(self, param: Tensor) -> bool:
        """Whether a parameter without statistics sits a step out, rather than being an error."""
        return False

    def _note_unreached(self) -> None:
        """Called when a step has gone well, before its observations are forgotten."""

    def _forget_observations(self) -> None:
        """Called when a step is through with its observations, or has raised."""

    # The public side.

    @_disable_dynamo  # which would trace a hundred pieces of it, for nothing
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

        A step that raises has used up what was observed for it. Where it raises before the update,
        as with too little memory for new factors, parameters and momenta are what they were, and it
        can be repeated, from the forward on: statistics that have taken in what was observed do not
        take it in again.
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
            moving = self._moving(team)
            pieces = self._statistic_gradients(team, moving)
            updates = [self._to_update(group, pieces, moving) for group in self.param_groups]
            observed = self._whole(pieces)
            first = {p: g for p, g in observed.items() if not self._has_state(p)}
            self.state.update(self._first_states(first))
            self._taken.update(first)
            if first:
                observed = {p: g for p, g in observed.items() if p not in first}
            self._run(self._device_step(observed, first, updates))
            self._note_unreached()
        except PreconditionerError:
            self._taken.clear()  # no repetition helps: the next attempt is of other observations
            raise
        finally:
            self._forget_observations()
        self._taken.clear()
        for group in self.param_groups:
            group["step"] += 1
        return loss

    def diagnostics(self) -> dict[str, float]:
        """Returns figures of every parameter, for a log; waits for the device.

        It takes longer than a step with nothing due (on an autoencoder's shapes by half): call it
        when the log is written, every hundred steps or so. Where processes share the work, each has
        those of what it keeps.

        Returns:
            By "FIGURE/NAME", as ``SummaryWriter.add_scalar`` takes them: "parameter_norm" (but of
            sharded parameters),
            "momentum_norm", "direction_norm" (without grafting and weight decay), "condition", the
            largest condition number of the parameter's factors, estimated from below, and the
            counts "skipped_statistics" and "failed_inverses". A parameter without a name is called
            "group.index".
        """
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        names = {
            p: group["param_names"][index] if "param_names" in group else f"{number}.{index}"
            for number, group in enumerate(self.param_groups)
            for index, p in enumerate(group["params"])
        }
        held = {p: self.state[p] for p in names if "factors" in self.state.get(p, {})}
        return diagnostics(held, names)

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
            check_state_dict(self.param_groups, adapted, set(self.defaults), self._kept)

        def finish(adapted: dict[str, Any]) -> None:
            self._failures, self._graphs, self._taken = Failures(), StepGraphs(), set()
            for group, modes in zip(self.param_groups, functions, strict=True):
                group["modes"] = modes
            for param, state in copied_states(self.param_groups, adapted, state_dtype):
                dropped = TENSORS - self._kept(param)
                self.state[param] = {k: v for k, v in state.items() if k not in dropped}
                self._count_again(self.state[param], param)

        load_adapted(self, with_integer_keys(state_dict), super().load_state_dict, check, finish)

    def __getstate__(self) -> dict[str, Any]:
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        own = {
            "_failures": self._failures,
            "capturable": self.capturable,
            "shard": self.shard,
            "_group_is_lost": self._group_is_lost or self.process_group is not None,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in ADDED.items():
                group.setdefault(name, value)
        self._graphs, self._taken = StepGraphs(), set()
        self._workspace = Workspace()
        if "shard" in state:  # a copy: a process group cannot be copied
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

    # The schedule.

    def _statistics_due(self, group: dict[str, Any]) -> bool:
        return bool(group["step"] % group["stat_interval"] == 0)

    def _device_step(
        self,
        observed: dict[Tensor, Tensor],
        first: Mapping[Tensor, Tensor],
        updates: Sequence[list[Tensor]],
    ) -> DeviceStep:
        """What the step has to do: blend what was observed, remake factors, update."""
        due = [self._factors_due(group, observed, first) for group in self.param_groups]
        return DeviceStep(
            blended=list(self._batches(observed.keys() - self._taken)),
            remade=self._split(due),
            updated=self._split(updates),
            observed=observed,
            grads=self._signed(updates),
            sharing=self._sharing(),
            taken=self._taken,
            workspace=self._workspace,
        )

    def _signed(self, updates: Sequence[list[Tensor]]) -> Gradients:
        """The gradients of what is to move, towards a minimum."""
        grads: dict[Tensor, Tensor | None] = {}
        for group, params in zip(self.param_groups, updates, strict=True):
            for p in params:
                grads[p] = -p.grad if group["maximize"] and p.grad is not None else p.grad
        return grads

    def _split(self, params: Sequence[list[Tensor]]) -> list[Batch]:
        """Parameters by group, split by device."""
        pairs = zip(self.param_groups, params, strict=True)
        return [(group, batch) for group, members in pairs for batch in by_device(members)]

    def _run(self, step: DeviceStep) -> None:
        if self.capturable:
            self._report(self._graphs.run(step, self.state, self._all_of_it))
            return
        self._report(self._refresh(step, _as_they_are))
        if self._team() is None or not any(p.is_cuda for p in step.grads):
            self._failures.read(self.state, self._name)
        step.update(self.state, _as_they_are)

    def _all_of_it(self, step: DeviceStep, settings: Callable[[Group], Settings]) -> list[Report]:
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
        known = observed.keys() | self._taken
        return [
            p
            for p in group["params"]
            if p in known and p not in first and t - self.state[p]["first_step"] < interval
        ]

    # The update.

    def _moving(self, team: Team | None) -> set[Tensor]:
        """The parameters that have a gradient; where they are sharded, in some process."""
        params = [p for group in self.param_groups for p in group["params"]]
        has = [p.grad is not None for p in params]
        if team is not None and self._is_sharded():
            has = team.anywhere(has, params[0].device)
        return {p for p, has_gradient in zip(params, has, strict=True) if has_gradient}

    def _to_update(
        self, group: dict[str, Any], observed: Container[Tensor], moving: Container[Tensor]
    ) -> list[Tensor]:
        """The group's parameters that this step moves."""
        ready = []
        for param in group["params"]:
            if param not in moving:
                continue
            if param.grad is not None and param.grad.layout != torch.strided:
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
            master = group["rounding"] == "master" and is_half(param)
            if known and master and "master" not in state:
                raise RuntimeError(
                    "rounding='master' must be set before the first statistics: "
                    f"{self._name(param)} has no master copy"
                )
            ready.append(param)
        return ready


def _as_they_are(group: Group) -> Settings:
    return {**group, "lr": as_number(group["lr"])}
