"""Schedule, step and saved state of the Kronecker-factored optimizers.

At step t = 0, 1, 2, ..., with T1 = stat_interval and T2 = inverse_interval, the statistics are
refreshed if t % T1 == 0, and the factors if t % T2 == 0. A parameter that was not used at such a
step has its statistics refreshed when it is used next. During its first T2 steps, a parameter's
factors are also refreshed with its statistics, which still change fast. With interval_warmup both
intervals grow from 1 to their values instead. Every step updates the parameters.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from tnt_optim import checkpoint
from tnt_optim.attach import Attachable
from tnt_optim.attempt import Attempt
from tnt_optim.autograd import buffers_put_back
from tnt_optim.checks import check_form, check_param, listed, warn_of_few_preconditioned
from tnt_optim.cuda_graphs import StepGraphs, check_graphs_device
from tnt_optim.diagnostics import diagnostics
from tnt_optim.directions import directions_
from tnt_optim.distributed import Owners, distribution
from tnt_optim.failures import Failures, PreconditionerError
from tnt_optim.first_states import FirstStates
from tnt_optim.fit import Fit, Shaping
from tnt_optim.groups import Groups
from tnt_optim.messages import UNFINISHED, warn_the_caller
from tnt_optim.modes import (
    Group,
    Layout,
    Rows,
    Settings,
    State,
    is_plain,
)
from tnt_optim.observations import Empirical, has_rows, warned_of_batch_norm
from tnt_optim.options import (
    OPTIONS,
    Fixed,
    check_settings,
    repeated_options,
    same_settings,
    split,
)
from tnt_optim.paper import paper_settings
from tnt_optim.processes import Processes
from tnt_optim.schedule import statistics_due
from tnt_optim.state import (
    ALLOCATED,
    COUNTS,
    NAMES,
    SURVIVES,
    add_master,
    check_state,
    has_entries,
    memory_estimate,
)
from tnt_optim.step import Plan, Step, plan_step
from tnt_optim.units import Units
from tnt_optim.wrappers import Wrappable

# Functions and tables of a group, which belong to the optimizer.
_NOT_SAVED = {"modes", "units"}


class KroneckerOptimizer(Attachable, Wrappable, Optimizer):
    """Base of the optimizers that precondition the momentum with a factor for every mode.

    A subclass computes factors from statistics (``_factors``), as the guide "Your own optimizer"
    shows.

    Args:
        params: parameters, named parameters or parameter groups, of any floating-point dtype.
        options: by the names of ``tnt_optim.options``; missing ones get their defaults.
        source: of the gradients for the statistics; by default the training gradients.

    Raises:
        ValueError: if an option or a parameter does not fit.
        TypeError: if an option is not in the table.
    """

    # The method's name in a saved state; subclasses for other purposes keep it.
    _method = "Kronecker-factored"

    # Whether the factors are inverses of the statistics, as ``estimator="mle"`` needs them.
    _whitens = False

    # Options of the optimizer as a whole.
    capturable, shard = Fixed(), Fixed()
    process_group: Any = None

    # Names of what has inverses, for messages; by default modes.
    _parts: Sequence[str] = ()

    # What is preconditioned as one tensor, and has statistics; None: each parameter by itself.
    _units: Units | None = None

    _group_is_lost = False  # a copy lacks its process group
    _is_share_checked = False  # whether the user was warned of few preconditioned entries
    _warned_of_part = False  # that ``state_dict`` has one process's part

    def __init__(
        self, params: Any, options: Mapping[str, Any], source: Empirical | None = None
    ) -> None:
        params = listed(params, type(self).__name__)
        defaults, whole = split(options)
        vars(self).update(whole)
        self._observed = Empirical() if source is None else source
        self._owners, self._failures = Owners(self.shard), Failures(self._parts)
        self._start_over()
        if self.capturable and self._units:
            raise ValueError(
                "capturable must be False for layers whose weight and bias are one unit, got True"
            )
        super().__init__(params, {**defaults, "step": 0, "takes_roots": False})

    def _start_over(self) -> None:
        """Forgets graphs, retries and a consolidated state, which belong to one state."""
        self._graphs = StepGraphs()
        self._is_alike = False  # whether all processes are known to have the same parameters
        self._shaping = Shaping()
        self._attempt = Attempt()
        self._fit = Fit(NAMES)
        # What other processes keep of the state, after consolidate_state_dict.
        self._consolidated: dict[Tensor, State] | None = None

    def _factors(self, group: Settings, stats: Rows, out: Rows) -> Tensor:
        """Computes the factors of statistics: the one method that a subclass must have.

        Args:
            group: the settings of the parameters' group.
            stats: for each block of a parameter, the statistics of its modes, (d, d) or (d,).
            out: the factors to overwrite, like ``stats``; identities at first. A block that fails
                leaves its own unchanged.

        Returns:
            For each block a code on the device: 0, or the number of the mode that failed, from 1.
        """
        raise NotImplementedError

    def _directions(
        self,
        group: Settings,
        states: Sequence[State],
        grads: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> tuple[list[Tensor], Tensor | None]:
        """Updates the momenta, and Adam's second moments with ``graft="adam"``; makes directions.

        Here the directions are the momenta times the factors. A method that makes them otherwise
        overrides this. It takes memory before it changes a moment, so that an error leaves them as
        they were.

        Args:
            group: as for ``_factors``.
            states: of the parameters, with the entries of ``tnt_optim.state.SPEC``.
            grads: for each parameter, in its own shape; of a layer that of [W | b].
            layouts: of each parameter: ``blocks`` and ``rows`` of ``tnt_optim.modes`` give tensors
                and factors as operators take them.

        Returns:
            The direction of each block, and what ``graft`` makes scales of, as
            ``tnt_kernels.grafted_directions_`` returns it; None for directions that have their
            length.
        """
        return directions_(grads, states, layouts, group)

    @property
    def multiplies(self) -> bool:
        """Whether directions are products with the factors, which the fused step computes."""
        return type(self)._directions is KroneckerOptimizer._directions

    @classmethod
    def paper(cls, params: Any, problem: str | None = None, **options: Any) -> Self:
        """The optimizer in the form of Ren & Goldfarb 2021, with their settings.

        Every parameter is preconditioned, the damping is absolute, and steps are not grafted.

        Args:
            params: as for the constructor.
            problem: "mnist", "faces", "resnet32" or "vgg16", for the settings of the paper's
                experiment; None for ``lr=1e-4, damping=0.01, stat_interval=10,
                inverse_interval=100``.
            options: replace these.
        """
        bases = [base for base in cls.__mro__ if issubclass(base, KroneckerOptimizer)]
        accepted = [inspect.signature(base).parameters for base in bases]
        form = {name: o.default for name, o in OPTIONS.items() if any(name in a for a in accepted)}
        table = paper_settings(cls._table(options), problem)
        return cls(params, **{**form, **table, **options})

    @classmethod
    def _table(cls, options: Mapping[str, Any]) -> str:
        """The name of the method in the paper's tables."""
        return cls._method

    # The public side.

    @property
    def has_unfinished_update(self) -> bool:
        """Whether the last ``step`` raised in the middle of its update, which the next finishes."""
        return self._attempt.update is not None

    @_disable_dynamo  # Dynamo would break it into a hundred graphs and gain nothing
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step.

        Args:
            closure: recomputes the loss, calls ``backward`` (and ``observe``), returns the loss.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: if a group's settings have become wrong; nothing is then changed.
            RuntimeError: if a parameter has a gradient but no statistics, and no output was asked
                for them, or a setting that shapes the state has changed, or a parameter's state or
                gradient does not fit its shape or dtype; nothing is then changed. (A parameter
                that the outputs do not reach takes the momentum without a preconditioner, with a
                warning.)
            PreconditionerError: if first statistics or inverses fail, or later ones repeatedly. No
                parameter is then changed.

        A step that raises has used up its observations. It can be repeated from the forward on, for
        example after memory ran out, with the bits of an undisturbed step: statistics that it has
        already refreshed are not refreshed again. If it raises before the update, parameters and
        momenta are unchanged. If it raises in the middle of the update, in a single process, it
        takes the gradients out of ``.grad``, and the next call finishes this update, with these
        gradients instead of new ones.
        """
        if closure is None and self._asks_for_state(self.param_groups):
            self.allocate_state()
            return None
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._consolidated = None
            if self._attempt.update is None:
                processes = self._checked_processes()
                done = self._attempt.accumulated
                plan = plan_step(self._groups, self.state, self._observed, processes, done)
                self._make_states(plan, processes)
                self._new_step(plan, processes).run(self._graphs if self.capturable else None)
            else:
                self._attempt.update.run()
        except PreconditionerError:
            self._attempt.forget()  # a retry does not help: the next step has new observations
            raise
        except BaseException as error:
            self._attempt.stop(error, self._groups.params)
            raise
        finally:
            self._observed.use_up()
        self._attempt.forget()
        for group in self.param_groups:
            group["step"] += 1
        return loss

    @_disable_dynamo  # as for step
    @torch.enable_grad()
    def observe(self, output: Any) -> None:
        """Samples labels at the model's output and keeps the gradient of their loss for ``step``.

        It does nothing if no statistics are due at this step, and nothing ever without a
        ``likelihood``: one loop serves all optimizers. Call it between the forward and the
        ``backward`` of the same pass: the graph is retained, and no ``.grad`` is touched. With
        gradient accumulation call it for each micro-batch: the gradients of one step's observations
        are averaged (under ``fully_shard`` only the first counts); so are those of a skipped step
        (as by ``GradScaler``), which has the same weights. An observation that is not finite is
        left out if another one, of the same parameters, is finite. An output without rows, of an
        empty batch, is left out, too.

        Args:
            output: of the model, as the likelihood describes it, with its graph; or ``Masked``, if
                some rows do not count.

        Raises:
            ValueError: if the output has no graph, the wrong number of dimensions, or depends on no
                parameter of this optimizer; nothing is then changed.
            RuntimeError: if the backward has run, the output is DistributedDataParallel's with
                ``static_graph=True``, or its model was compiled with donated buffers.
        """
        if wanted := self._wanted():
            processes = self._distribution()
            if processes.is_sharded or has_rows(output):  # sharded: all need every backward
                self._observed.observe(self, output, wanted, processes)
            else:
                self._observed.left_out = True

    def warm_start(self, outputs: Iterable[Any], *, model: nn.Module | None = None) -> None:
        """Starts the statistics from their plain average over many batches, and the factors too.

        Best over the whole data set at the initial weights, as in the paper:
        ``opt.warm_start((model(x) for x, _ in batches), model=model)``. Existing statistics start
        over.

        Args:
            outputs: for each batch, with its graph: the argument of ``observe``, or the training
                loss if the statistics come from the training gradients.
            model: its buffers (batch norm's running statistics) are restored afterwards. Without
                it, batch norm in training mode changes them, with a warning.

        Raises:
            ValueError: if there is no batch, or an output does not fit; nothing is then changed.
            PreconditionerError: if no batch gave a finite gradient, or a factor could not be
                computed; nothing is then changed.
        """
        if not isinstance(outputs, Iterable) or isinstance(outputs, Tensor):
            raise TypeError(f"outputs must be an iterable of outputs, got {type(outputs).__name__}")
        processes = self._distribution()
        self._check_alike(processes)
        if not self._groups.modelled:
            return
        self._check_fit(processes)
        if model is None or isinstance(outputs, Sequence):  # a list's forwards have run
            outputs = warned_of_batch_norm(outputs)
        with buffers_put_back(*([] if model is None else [model])), self._warming_up():
            gradients = self._observed.batch_gradients(self, outputs, processes)
            fresh = self._first_states(processes).from_batches(gradients)
        self._shaping.check(self.param_groups, self.state, self._name, fresh)
        self._failures, self._consolidated = Failures(self._parts), None
        self._adopt(fresh)

    def allocate_state(self, unreached: Iterable[Tensor] = ()) -> None:
        """Gives every trainable parameter without state a new one, to load into.

        Loaders that load in place, such as ``torch.distributed.checkpoint``, find in it the tensors
        that this process keeps. Load before the next step: without a load, the state counts as
        none. torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` get it by a step
        with gradients and rates of zero, which moves and counts nothing.

        Args:
            unreached: parameters without statistics in the saved state, because no output had
                reached them (a value head).
        """
        plain = set(unreached)
        if others := [tuple(p.shape) for p in plain.difference(self._groups.params)]:
            raise ValueError(f"unreached must be parameters of this optimizer, got {others[0]}")
        processes = self._distribution()
        self._check_fit(processes)
        trainable = [p for p in self._groups.keys if self._groups.units.is_trainable(p)]
        self._add_states(trainable, plain, processes)

    def memory_estimate(self) -> dict[str, Any]:
        """Returns the bytes of the optimizer's state in this process, before training.

        Returns:
            "parameters": for each trainable one its "name", "shape", "statistics" (their shapes),
            and in bytes "stats", "factors", "moments" and "master"; "total": the sum of all these
            bytes. A step also needs memory for at least one copy of the largest parameter, with
            ``graft`` for two; a refresh with ``estimator="mle"`` for a few.
        """
        return memory_estimate(self.param_groups, self._distribution().kept, self._name)

    def failures(self) -> dict[str, int]:
        """Returns the numbers of failed refreshes; waits for the device.

        "skipped_statistics" counts refreshes left out because a gradient was not finite, of the
        parameter with the most; "failed_inverses" counts failed refreshes of all parameters'
        factors; "unreached" counts the parameters that have moved without a preconditioner because
        no observed output has reached them.
        """
        held = {p: self.state.get(p, {}) for p in self._groups.params}
        states = {p: state for p, state in held.items() if has_entries(state)}
        unreached = sum(
            not is_plain(p, group) and p in states and states[p]["first_step"] is None
            for group in self.param_groups
            for p in group["params"]
        )
        return self._failures.totals(states, self._name) | {"unreached": unreached}

    def diagnostics(self) -> dict[str, float]:
        """Returns figures of every parameter, for a log; waits for the device.

        It takes longer than a step with nothing due (by half, on an autoencoder's shapes): call it
        every hundred steps or so. With several processes, each has the figures of the parameters
        that it keeps.

        Returns:
            By "FIGURE/NAME", as ``SummaryWriter.add_scalar`` takes them: "parameter_norm" (not of
            sharded parameters), "momentum_norm", "direction_norm" (without grafting and weight
            decay), "condition", the largest condition number of the parameter's factors, estimated
            from below, and the counts "skipped_statistics" and "failed_inverses". NAME is the
            parameter's name, "group.name" if another group has it, too, and "group.index" if there
            is none, or several in its group have it.
        """
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        names = self._groups.unique_names()
        held = {p: self.state[p] for p in names if "factors" in self.state.get(p, {})}
        return diagnostics(held, names, multiplies=self.multiplies)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with settings of their own; they join at the optimizer's present step.

        Raises:
            ValueError: if a setting or a parameter does not fit; nothing is then added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            repeated = self._check_settings(group)
            for param, count in Counter(group["params"]).items():
                graphs = self.capturable
                check_param(param, group, self.param_groups, self._name, capturable=graphs)
                if self.capturable:
                    check_graphs_device(param, self.param_groups[0]["params"][:1])
                if count > 1:
                    raise ValueError(f"params must differ, got {self._name(param)} twice")
        except Exception:
            self.param_groups.pop()
            raise
        for name in repeated:
            del group[name]
        # The first group starts at 0, even if its dict comes from another optimizer.
        group["step"] = self.param_groups[0]["step"] if len(self.param_groups) > 1 else 0
        group["takes_roots"] = group["early_roots"] and not self._samples
        self._owners.add(group)
        self._is_alike = False

    def state_dict(self) -> dict[str, Any]:
        """Returns state and settings, loadable with ``torch.load(weights_only=True)``.

        To be called between steps. ``modes`` functions are left out: the optimizer that loads it
        has its own. Observations of a step that was skipped are saved by a single process; several
        leave them out. With ``shard`` or ``fully_shard`` it holds this process's part of the state,
        with a warning after the first step, unless ``consolidate_state_dict`` was called before.
        """
        if self.has_unfinished_update:
            warn_the_caller(UNFINISHED)
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        return checkpoint.save_completed(self, super().state_dict, self._complete)

    def _complete(self, state_dict: dict[str, Any]) -> None:
        """Brings torch's own ``state_dict`` into the form that is saved."""
        for group in state_dict["param_groups"]:
            for name in _NOT_SAVED & group.keys():
                del group[name]
        state_dict["method"] = self._method
        if sampling := checkpoint.sampling_of(self):
            state_dict["sampling"] = sampling
        numbers = {param: number for number, param in enumerate(self._groups.params)}
        lost = self._group_is_lost and self.process_group is None
        processes = Processes() if lost else self._distribution()
        for param, entries in (self._consolidated or {}).items():
            kept = state_dict["state"][numbers[param]]  # the optimizer's: not to be changed
            state_dict["state"][numbers[param]] = {**kept, **entries}
        if self._attempt.accumulated:
            state_dict["accumulated"] = sorted(
                numbers[p] for p in self._attempt.accumulated & {*numbers}
            )
        # Without parameters of a group that the user removed.
        missed = {p: status for p, status in self._observed.missed.items() if p in numbers}
        if missed:
            state_dict["missed"] = {numbers[p]: status for p, status in missed.items()}
        is_trained = any(group["step"] for group in self.param_groups)  # else it is to be loaded
        if is_trained and self._consolidated is None and not self._warned_of_part:
            self._warned_of_part = checkpoint.warn_of_part(self._groups.params, self.state)
        if getattr(self._observed, "count", 0) and not processes.is_distributed:
            state_dict["observed"] = self._observed.saved(numbers)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all processes in one, for its ``state_dict``.

        With ``shard`` or ``fully_shard`` every process keeps a part of the state. Call this in all
        of them; ``state_dict`` in process ``to`` then has the whole state, until the next step. It
        loads in any number of processes, with any ``shard``. The other processes' parts are on the
        CPU.

        Args:
            to: the rank in the process group, or among the processes that divide a parameter.
        """
        self._consolidated = self._distribution().others_parts(self._groups.params, self.state, to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the ``state_dict`` of an optimizer of the same parameters.

        Hooks before it (``register_load_state_dict_pre_hook``) may adapt it to the parameters.

        Raises:
            ValueError: if it is of another optimizer, other parameters, the same names in another
                order, or other kinds of modes (full or diagonal); nothing is then changed.
        """
        unsaved = [{k: group[k] for k in _NOT_SAVED & group.keys()} for group in self._groups.all]
        processes = self._distribution()
        accumulated: set[Tensor] = set()
        observed: dict[str, Any] = {}

        def check(adapted: dict[str, Any]) -> None:
            checkpoint.check_groups(self._method, self.param_groups, adapted, set(self.defaults))
            for name, group, param, state in checkpoint.saved_states(self.param_groups, adapted):
                check_state(name, state, group, param, processes.kept(param))
            params = checkpoint.params_in(adapted, self.param_groups)
            accumulated.update(params[n] for n in checkpoint.accumulated_in(adapted, params))
            in_progress = self._samples and not processes.is_distributed
            missed = checkpoint.missed_in(adapted, params)
            observed["missed"] = {params[n]: status for n, status in missed.items()}
            if in_progress and "observed" in adapted:
                observed.update(self._observed.loaded(adapted["observed"], params))

        def finish(adapted: dict[str, Any]) -> None:
            for group, functions in zip(self.param_groups, unsaved, strict=True):
                group.update(functions)
            self._failures = Failures(self._parts)
            self._observed.use_up()
            self._attempt = Attempt(accumulated)
            for param, state in checkpoint.copied_states(self.param_groups, adapted):
                kept = processes.kept(param)
                entries = {name: value for name, value in state.items() if name in kept}
                self._set_counts(entries, param)
                self._set_entries(param, entries)
            for field, value in observed.items():
                setattr(self._observed, field, value)
            self._note_states()
            checkpoint.warn_of_zeros(self._groups.params, self.state, self._name)
            checkpoint.warn_of_other_sampling(self, adapted)

        load = super().load_state_dict
        checkpoint.load_adapted(self, state_dict, load, self._converted, check, finish)

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A saved state in today's form."""
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        options = {**self._whole, "process_group": None}  # cannot be copied
        lost = self._group_is_lost or self.process_group is not None
        names = "_failures", "_observed", "_owners", "_attempt", "_fit"
        kept = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **options, **kept, "_group_is_lost": lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start_over()
        super().__setstate__(state)
        if "_observed" in state:  # a copy; torch also calls this when it loads a state_dict
            self._note_states()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        lines += [f"  {name}: {value}" for name, value in sorted(self._whole.items())]
        return "\n".join([*lines, *self._groups.described(), ")"])

    # The schedule.

    def _wanted(self) -> list[Tensor]:
        """The parameters that an output would be asked for now."""
        if not (self._samples and self._groups.params):
            return []
        due = statistics_due(self.param_groups, self.state, self._observed.waits_for)
        return self._observed.wanted(due)

    @property
    def _samples(self) -> bool:
        return self._observed.samples

    def _checked_processes(self) -> Processes:
        """How processes divide this step, after all checks."""
        # The user may have changed them. Groups with equal ones are checked together.
        for group in {same_settings(group): group for group in self.param_groups}.values():
            self._check_settings(group)
        self._shaping.check(self.param_groups, self.state, self._name)
        if not self._is_share_checked:
            self._is_share_checked = True
            warn_of_few_preconditioned(self.param_groups, type(self).__name__)
        processes = self._distribution()
        if self._observed.pools or processes.shard is not None:
            self._check_alike(processes)
        self._check_fit(processes)
        # On a GPU one process may have a report before another, and an error must stop all of them
        # at the same step. The report is a step old: the wait is short.
        wait, groups = processes.is_distributed, self.param_groups
        self._failures.read(self.state, self._name, wait=wait, groups=groups)
        return processes

    def _make_states(self, plan: Plan, processes: Processes) -> None:
        """Makes the first states of a step, with statistics and factors."""
        if plan.first:
            self._adopt(self._first_states(processes).from_gradients(plan.first))
            self._attempt.accumulated.update(plan.first)
        self._add_states(plan.updated, set(plan.updated), processes)
        self._observed.warn_of_missed(plan.updated, self.state, self._name)

    def _new_step(self, plan: Plan, processes: Processes) -> Step:
        """The step, without what an earlier attempt at it has done."""
        groups, attempt = self._groups, self._attempt
        updated = list(groups.batches(plan.updated))
        for group, params in updated:
            for param in params if group["rounding"] == "master" else ():
                add_master(self.state[param], param, group)
        return Step(
            statistics=list(groups.batches(plan.refreshed.keys() - attempt.accumulated)),
            factors=list(groups.batches(plan.inverted - attempt.inverted)),
            updated=updated,
            observed=plan.refreshed,
            grads=groups.gradients(updated),
            members=groups.members(plan.updated),
            groups=groups,
            states=self.state,
            method=self,
            source=self._observed,
            processes=processes,
            attempt=attempt,
            failures=self._failures,
        )

    # First statistics.

    @contextmanager
    def _warming_up(self) -> Iterator[None]:
        """Keeps the hook of ``attach`` from observing the outputs of a warm start."""
        self._warming = True
        try:
            yield
        finally:
            self._warming = False
            if self._attached is not None:  # the hook observed outputs computed before, as a list
                self._observed.use_up()

    def _first_states(self, processes: Processes) -> FirstStates:
        return FirstStates(self._groups, processes, self, self._observed)

    def _add_states(
        self, params: Iterable[Tensor], plain: Container[Tensor], processes: Processes
    ) -> None:
        """Gives parameters that have none a state: without statistics of those in ``plain``."""
        held = self.state.get
        lacking = {p for p in params if held(p, {}).get("first_step", ALLOCATED) == ALLOCATED}
        if lacking:
            self._adopt(self._first_states(processes).without_statistics(lacking, plain))

    def _adopt(self, fresh: Mapping[Tensor, State]) -> None:
        """Takes new states, all or none; moments and master copies of earlier ones survive."""
        for param, state in fresh.items():
            earlier = self.state.get(param, {})
            self._set_counts(state, param)
            for name in earlier.keys() & state.keys() & set(SURVIVES):
                old = earlier[name]  # the modes may differ
                state[name] = old if name in COUNTS else old.reshape(state[name].shape)
        for param, state in fresh.items():
            self._set_entries(param, state)
        if fresh:
            self._note_states()

    def _set_entries(self, param: Tensor, entries: State) -> None:
        """Replaces the optimizer's entries of a parameter's state, and no others."""
        others = {k: v for k, v in self.state.get(param, {}).items() if k not in NAMES}
        self.state[param] = {**others, **entries}
        rest = self._groups.units.members(param)[1:]
        for member in set(rest).intersection(self._groups.params) if rest else ():
            # torch's set_optimizer_state_dict wants a state of each trainable parameter.
            self.state[member].setdefault("joined", 1)

    # Processes and parameters.

    def _distribution(self) -> Processes:
        """How the processes that run now divide a step."""
        group, lost = self.process_group, self._group_is_lost
        found = distribution(self.param_groups, group, self.shard, self._owners, is_lost=lost)
        if found.is_distributed and self.capturable:
            raise RuntimeError(
                "capturable=True works in a single process, with whole parameters: leave it off"
            )
        return found

    def _check_alike(self, processes: Processes) -> None:
        """Refuses processes with other parameters. All processes call it; they wait once.

        It does not depend on the schedule: a process may have no parameter with statistics.
        """
        if processes.is_distributed and not self._is_alike:
            processes.check_alike(self._groups.params)
            self._is_alike = True

    @property
    def _groups(self) -> Groups:
        if self._units is not None:  # wrappers replace groups by saved ones
            for group in self.param_groups:
                group["units"] = self._units
        return Groups(self.param_groups)

    def _name(self, param: Tensor) -> str:
        return self._groups.name(param)

    @property
    def _whole(self) -> Settings:
        """The options of the optimizer as a whole."""
        return {name: value for name, value in vars(self).items() if name in OPTIONS}

    def _check_settings(self, group: Group) -> list[str]:
        """Checks a group; returns the options in it that repeat those of the optimizer."""
        names = repeated_options(group, self.defaults, self._whole, type(self).__name__)
        check_settings(group)
        check_form(group, type(self).__name__, whitens=self._whitens)
        return names

    def _note_states(self) -> None:
        """Remembers the shapes and the settings of new states, for checks."""
        self._fit.note(self._groups.params, self.state)
        self._shaping.note(self.param_groups, self.state)

    def _check_fit(self, processes: Processes) -> None:
        """Refuses states and gradients that do not fit parameters, which the user may change."""

        def check(param: Tensor, state: State) -> None:
            group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
            check_state(self._name(param), state, group, param, processes.kept(param))

        observed = getattr(self._observed, "totals", {})
        self._fit.check(self._groups.params, self.state, self._name, check, observed)

    def _asks_for_state(self, groups: Sequence[Group]) -> bool:
        """Whether torch takes this step to get a new state."""
        return not self.state and checkpoint.asks_for_state(groups, self._distribution)

    def _set_counts(self, state: State, param: Tensor) -> None:
        """Makes counts tensors if CUDA graphs go on counting, else integers."""
        for name in state.keys() & set(COUNTS):
            count = int(state[name])
            state[name] = count
            if self.capturable:
                state[name] = torch.full((), count, dtype=torch.float64, device=param.device)
