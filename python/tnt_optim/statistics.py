"""Statistics and factors of the Kronecker-factored optimizers: what starts them, and who has them.

What a parameter's state holds is in ``states``. The state of a parameter exists whole or not at
all: its first statistic brings the factors and a zero momentum with it. Where processes share the
work, a process has the statistics of the parameters that it owns.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tnt_kernels import gram_ema_
from tnt_optim.autograd import (
    all_finite,
    buffers_put_back,
    check_reached,
    check_scalar_loss,
    gradients_of,
)
from tnt_optim.cuda_graphs import check_graphs_device
from tnt_optim.distributed.process_group import (
    Gradients,
    Team,
    check_static_graph,
    is_sharded,
    pooled,
    replicas_behind,
    team_of,
)
from tnt_optim.distributed.replicated import SHARDS, Owners, Sharing
from tnt_optim.failures import Failures, PreconditionerError
from tnt_optim.memory import estimate
from tnt_optim.options import check_settings
from tnt_optim.state import (
    COUNTS,
    MOMENTS,
    TENSORS,
    State,
    blocks,
    is_half,
    layout,
    new_state,
    rows,
    zero_statistics,
)
from tnt_optim.update import Group, Settings, by_device, worst_of_blocks


class FactoredOptimizer(Optimizer):
    """Base of the optimizers whose parameters have statistics and factors for every mode.

    A subclass says what the factors are (``_factors``), and what ``warm_start`` is given.
    """

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
        self._group_is_lost = False  # of a copy
        self.shard = shard
        self._owners = Owners()
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

    def _statistic_loss(self, output: Any, index: int, team: Team | None) -> Tensor:
        """Turns what ``warm_start`` was given for batch ``index`` into a scalar with a graph."""
        return check_scalar_loss("outputs (here: training losses)", output)

    def _scale(self, loss: Tensor, output: Any) -> float:
        """What the loss of an output is multiplied by before its backward."""
        return 1.0

    # The public side.

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
            for key in earlier.keys() & state.keys() & {"master", *MOMENTS}:
                state[key] = earlier[key].reshape(state[key].shape)  # its modes may have changed
            state.update({key: earlier[key] for key in COUNTS & earlier.keys()})
            self.state[param] = state

    def allocate_state(self) -> None:
        """Gives every trainable parameter that has none a state of zeros, to load something into.

        What loads in place, as ``torch.distributed.checkpoint`` does, finds in it the tensors that
        this process keeps. Until it is loaded parameters do not move: their factors are zero.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self._has_state(param):
                    self.state[param] = new_state(param, group, self._kept(param))
                    self._count_again(self.state[param], param)

    def memory_estimate(self) -> dict[str, Any]:
        """Returns the bytes that the optimizer's state will take in this process, before training.

        Returns:
            "parameters": for each that is trainable its "name", "shape", "statistics" (their
            shapes), and in bytes "stats", "factors", "moments" and "master"; "total": the sum of
            all these bytes. Beside its state a step needs scratch memory, for at least a copy of
            the largest parameter; with ``graft`` for two, which on the CPU are kept between steps.
        """
        return estimate(self.param_groups, self._kept, self._name)

    def failures(self) -> dict[str, int]:
        """Returns how often statistics were left out and inverses failed; waits for the device.

        "skipped_statistics" counts the refreshes left out because a gradient was not finite (of the
        parameter that lost most), "failed_inverses" the failed refreshes of all parameters.
        """
        self._failures.read(self.state, self._name, wait=True, fatal=False)
        known = [p for group in self.param_groups for p in group["params"]]
        states = [self.state[p] for p in known if self._has_state(p)]
        skipped = [state["skipped_statistics"] for state in states]
        failed = [state["failed_inverses"] for state in states]
        return {"skipped_statistics": max(skipped, default=0), "failed_inverses": sum(failed)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with settings of their own; they join at the optimizer's present step.

        Raises:
            ValueError: where a setting or a parameter does not fit; nothing is then added.
        """
        for name in self._shared:
            if isinstance(param_group, dict) and name in param_group:
                raise ValueError(f"{name} cannot be set for a parameter group, only for all")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            for param in group["params"]:
                self._check_param(param, group)
        except Exception:
            self.param_groups.pop()
            raise
        group["step"] = self.param_groups[0]["step"]

    def _check_param(self, param: Tensor, group: Group) -> None:
        """Checks that a parameter can have its group's settings.

        Raises:
            ValueError: names the rule and the parameter.
        """
        name, rounding = self._name(param), group["rounding"]
        if not param.is_floating_point() or param.layout != torch.strided:
            raise ValueError(
                "params must be dense real floating-point tensors, got "
                f"{param.dtype}, {param.layout} for {name}"
            )
        layout(param, group)
        if is_sharded(param) != self._is_sharded():
            raise ValueError(
                "params must all be sharded over one device mesh, or none, got both: "
                f"{name} is {'' if is_sharded(param) else 'not '}sharded"
            )
        if is_sharded(param) and is_half(param) and rounding == "master":
            raise ValueError(
                "rounding='master' is not for sharded parameters: fully_shard's "
                "MixedPrecisionPolicy(param_dtype=...) keeps them in float32, got "
                f"{param.dtype} for {name}"
            )
        if param.dtype == torch.float16 and rounding == "stochastic":
            raise ValueError(f"rounding='stochastic' is for bfloat16, got {param.dtype} for {name}")
        if self.capturable:
            if rounding == "stochastic":
                raise ValueError("rounding='stochastic' cannot be part of CUDA graphs")
            check_graphs_device(param, self.param_groups[0]["params"][:1])

    # First statistics.

    def _average_statistics(self, outputs: Iterable[Any]) -> tuple[dict[Tensor, list[Tensor]], int]:
        """The plain average over batches, and how many were left out for not being finite."""
        trainable = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        stats: dict[Tensor, list[Tensor]] = {}
        batches = skipped = 0
        for observed in self._batch_gradients(outputs, trainable):
            if not self._all_finite(observed):
                skipped += 1
                continue
            for p in stats.keys() - observed.keys():
                observed[p] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
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
                observed = self._gradients(
                    loss, trainable, retain_graph=False, scale=self._scale(loss, output)
                )
                check_reached(observed)
            if team is None or self._is_sharded():
                if output is _NO_MORE:
                    return
                yield self._whole(observed)
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
        if observed and not self._all_finite(observed):
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
            for p in params:
                has, made_here = self._kept(p), factors.get(p)
                states[p] = new_state(p, group, has, stats=stats[p], factors=made_here)
                self._count_again(states[p], p)
            if sharing is not None:
                sharing.send_factors(params, states)
        return states

    # Processes.

    def _is_sharded(self) -> bool:
        """Whether the parameters are in pieces, as ``fully_shard`` leaves them."""
        return any(is_sharded(group["params"][0]) for group in self.param_groups if group["params"])

    def _gradients(
        self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool, scale: float = 1.0
    ) -> dict[Tensor, Tensor]:
        """The gradients of ``loss`` for those of ``params`` it depends on, or pieces of them."""
        if self._is_sharded():
            from tnt_optim.distributed.fsdp import sharded_gradients

            return sharded_gradients(loss, params, retain_graph=retain_graph, scale=scale)
        return gradients_of(loss, params, retain_graph=retain_graph, scale=scale)

    def _whole(self, gradients: Gradients) -> dict[Tensor, Tensor]:
        """Gradients of what this process owns as they are, where there are pieces of them."""
        sharing = self._sharing()
        if sharing is not None and gradients:
            return sharing.whole(gradients)
        return {p: g for p, g in gradients.items() if g is not None}

    def _all_finite(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """Whether all gradients are finite, in all processes."""
        sharing = self._sharing()
        return (all_finite if sharing is None else sharing.all_finite)(gradients.values())

    def _team(self) -> Team | None:
        if self._is_sharded():
            from tnt_optim.distributed.fsdp import team_of_shards

            params = [p for group in self.param_groups for p in group["params"]]
            team: Team | None = team_of_shards(params)
        else:
            team = team_of(self.process_group, is_lost=self._group_is_lost)
        if team is not None and self.capturable:
            raise RuntimeError(
                "capturable=True works in a single process, and torch.distributed runs "
                f"{team.size}: leave it off"
            )
        return team

    def _sharing(self) -> Sharing | None:
        team = self._team()
        sharded = self._is_sharded()
        if team is None or (self.shard is None and not sharded):
            return None
        moments = sharded or self.shard == "directions"

        def owner(param: Tensor) -> int:
            return self._owners.of(param, self.param_groups, team.size, moments)

        if sharded:
            from tnt_optim.distributed.fsdp import Shards

            return Shards(team, owner)
        assert self.shard is not None
        return Sharing(team, self.shard, owner)

    def _kept(self, param: Tensor) -> frozenset[str]:
        """Which tensors of a parameter's state this process keeps."""
        sharing = self._sharing()
        return TENSORS if sharing is None else sharing.keeps(param)

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


_NO_MORE = object()
