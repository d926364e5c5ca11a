"""The gradients that refresh the statistics: the training's own, or sampled ones.

All sources have one interface. ``Empirical`` reads ``.grad`` and keeps nothing. ``Observed`` is the
base of those that keep something between ``observe`` and ``step``, and remember which parameters
the outputs missed: ``Sampled`` adds up gradients at sampled labels; KFAC has its own.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tnt_kernels import gram_ema_
from tnt_optim import checkpoint
from tnt_optim.autograd import (
    Gradients,
    all_finite,
    changed_batch_norm,
    check_graph,
    check_reached,
    checked_replicas,
    leaves_of,
    shows_float16,
)
from tnt_optim.groups import Groups
from tnt_optim.likelihoods import (
    LARGEST_SCALE,
    check_scalar_loss,
    example_count,
    loss_at_samples,
    sample_scale,
    share_counted,
    with_rows,
)
from tnt_optim.messages import UNOBSERVED, observed_by_some, warn_if_twice, warn_the_caller
from tnt_optim.mismatch import Comparison, watched
from tnt_optim.modes import Layout, States, is_sharded, rows, state_dtype
from tnt_optim.processes import Processes
from tnt_optim.state import has_statistics

# Status of a parameter that got no statistics when they were due:
# n > 0: ask for its statistics at every step, for at most n more steps, until an output depends on
#     it. (Sampled gradients: it had a gradient in a step that observed nothing for it.)
# IDLE: no output has depended on it, and it has had no gradient, or none for PATIENCE steps. Ask
#     for its statistics when they are due.
# LOSS_ONLY: it had a gradient in a step whose observed output does not depend on it. Ask as for
#     IDLE.
PATIENCE, IDLE, LOSS_ONLY = 1000, 0, -1
_NO_MORE = object()


@dataclass
class Empirical:
    """The training gradients themselves."""

    # Parameters whose statistics were due; with sampled gradients, those asked of an output.
    asked: set[Tensor] = field(default_factory=set)
    missed: dict[Tensor, int] = field(default_factory=dict)
    hint: str = ""  # why nothing is observed at this step, if that is known
    summed: int | Tensor = 1  # how many observations are in the sums; on the device if masks decide
    count: int = 0  # how many outputs were observed
    left_out: bool = False  # whether an output without rows was left out
    warned_of_missed: bool = False
    samples: ClassVar[bool] = False  # whether outputs are observed
    pools: ClassVar[bool] = False  # whether processes exchange what they observed
    text_of_missed: ClassVar[str] = (
        "the observed output does not depend on {name}, which has a gradient of the loss: it is "
        "updated with plain momentum until an output does (warned once; failures() counts such "
        "parameters)"
    )

    def observe(
        self, optimizer: Any, output: Any, wanted: list[Tensor], processes: Processes
    ) -> None:
        """Keeps what an output gives for the statistics of the ``wanted`` parameters."""

    def wanted(self, due: Sequence[Tensor]) -> list[Tensor]:
        """The parameters among ``due`` for which an output would be observed now."""
        return []

    def gradients(
        self,
        processes: Processes,
        due: Sequence[Tensor],
        with_gradients: Container[Tensor],
        held: Container[Tensor],
    ) -> Gradients:
        """The gradients for the statistics of one step, of the same parameters in all processes.

        ``due`` holds the parameters whose statistics are due, and those that wait for their first
        ones; parameters in ``held`` have statistics.
        """
        self.asked = {p for p in due if p in held}  # others are due anyway
        return {p: p.grad for p in due if p in with_gradients}

    def saved(self, numbers: Mapping[Tensor, int]) -> dict[str, Any]:
        """The observations since the last step, with numbers in place of parameters."""
        return {}

    def loaded(self, saved: Any, params: Mapping[int, Tensor]) -> dict[str, Any]:
        """A copy of what was ``saved``: fields by name.

        Raises:
            ValueError: if an entry does not fit the parameters, which are by number.
        """
        return {}

    def witnesses(self, observed: Iterable[Any]) -> list[Tensor]:
        """Tensors whose squared norms must be finite, or the statistics stay as they are."""
        return list(observed)

    def accumulate_(
        self,
        stats: Sequence[list[Tensor]],
        observed: Sequence[Any],
        layouts: Sequence[Layout],
        decay: float | Tensor,
        factors: Sequence[list[Tensor]] | None,
    ) -> None:
        """Statistics <- decay * statistics + (1 - decay) * Gram matrices of gradients.

        All lists are by parameter. With ``factors`` the other modes of each Gram matrix are
        whitened by them.
        """
        gradients: list[Tensor] = []
        own_rows: list[list[Tensor]] = []
        for gradient, entries, layout in zip(observed, stats, layouts, strict=True):
            gradients += layout.blocks(gradient)
            own_rows += layout.rows(entries)
        others = None if factors is None else rows(factors, layouts)
        gram_ema_(own_rows, gradients, decay, others)

    def counted(self, optimizer: Any, output: Any) -> int | Tensor:
        """1 for an output with a row that counts, else 0."""
        return 1

    def batches(
        self, optimizer: Any, outputs: Iterable[Any], processes: Processes
    ) -> Iterator[Any]:
        """The batches of ``warm_start`` that count."""
        return iter(outputs)

    def batch_loss(
        self, optimizer: Any, output: Any, index: int, processes: Processes
    ) -> tuple[Tensor, float]:
        """The loss of batch ``index`` of ``warm_start``, and the scale of its backward."""
        return check_scalar_loss("outputs (here: training losses)", output), 1.0

    def batch_gradients(
        self, optimizer: Any, outputs: Iterable[Any], processes: Processes
    ) -> Iterator[dict[Tensor, Tensor]]:
        """The mean gradients of each batch of ``warm_start``, over all processes."""
        params = Groups(optimizer.param_groups).modelled
        batches = self.batches(optimizer, outputs, processes)
        for index in itertools.count():
            output, observed = next(batches, _NO_MORE), None
            number: int | Tensor = 0
            if output is not _NO_MORE:
                loss, scale = self.batch_loss(optimizer, output, index, processes)
                checked_replicas(loss)
                observed = processes.gradients(loss, params, retain_graph=False, scale=scale)
                check_reached(observed)
                number = self.counted(optimizer, output)
            mean = processes.batch_mean(params, observed, number)
            if mean is None:
                return
            if mean:  # some row counts
                yield mean

    def waits_for(self, param: Tensor, *, is_new: bool) -> bool:
        """Whether a parameter gets statistics from the next output that reaches it.

        One without statistics (``is_new``) does, unless outputs have missed it.
        """
        return self.missed.get(param, PATIENCE if is_new else IDLE) > 0

    def requires(self, param: Tensor) -> bool:
        """Whether a parameter without statistics cannot be updated: nothing was asked for it."""
        return self.waits_for(param, is_new=True)

    def warn_of_missed(
        self, params: Iterable[Tensor], states: States, name: Callable[[Tensor], str]
    ) -> None:
        """Warns once of parameters without statistics, to be updated, that outputs have missed."""
        asked = set() if self.warned_of_missed else self.overlooked()
        missed = [p for p in params if p in asked and not has_statistics(states.get(p, {}))]
        # Zeros, which ``zero_grad`` may leave, are no gradient; a sharded one has pieces elsewhere.
        missed = [p for p in missed if is_sharded(p) or (p.grad is not None and p.grad.any())]
        if missed:
            self.warned_of_missed = True
            more = f" (and {len(missed) - 1} more)" if len(missed) > 1 else ""
            warn_the_caller(self.text_of_missed.format(name=f"{name(missed[0])}{more}"))

    def overlooked(self) -> set[Tensor]:
        """Parameters that outputs may have missed."""
        return self.asked

    def missed_after(
        self, reached: Container[Tensor], grads: Gradients, *, is_sharded: bool
    ) -> dict[Tensor, int]:
        """What ``missed`` is after this step, if it succeeds.

        ``reached`` got statistics in this step, ``grads`` are the gradients of the loss.
        """
        known = dict.fromkeys(self.asked, PATIENCE) | self.missed
        return {p: status for p, status in known.items() if p not in reached}

    def use_up(self) -> None:
        """Forgets the observations, after a step or an error in it."""
        self.asked = set()


def has_rows(output: Any) -> bool:
    """Whether an output has a row; one that is no tensor is refused later."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return not tensors or any(tensor.numel() for tensor in tensors)


@dataclass
class Observed(Empirical):
    """What outputs have given since the last step, pooled over processes."""

    attached: int = 0  # outputs that the hook of ``attach`` observed
    some_lack: bool = False  # whether processes lack an output, and all processes know it
    partial: bool = False  # whether outputs may reach other parameters in another process
    agreed: bool = False  # whether all processes know of ``partial``
    warned: bool = False  # whether the user was warned that this or another process lacks outputs
    warned_twice: bool = False  # and of one with those of ``attach`` and of the loop
    comparisons: list[Comparison] = field(default_factory=list)  # at the first step
    samples: ClassVar[bool] = True
    pools: ClassVar[bool] = True

    def gradients(
        self,
        processes: Processes,
        due: Sequence[Tensor],
        with_gradients: Container[Tensor],
        held: Container[Tensor],
    ) -> Mapping[Tensor, Any]:
        """See ``Empirical.gradients``: the means over the observations of all processes."""
        if self.attached:
            warn_if_twice(self)
        for comparison in self.comparisons:
            comparison.warn(self.count)
        wanted = self.wanted(due)
        is_pooled = bool(wanted) and processes.is_distributed
        lacks = self.lacks
        means = self.pooled(processes, wanted, held) if is_pooled else self.means(held)
        if self.some_lack or (lacks and self.count):
            self.note_lack(observed_by_some(here=not lacks) + self.hint, wanted, held)
        # A frozen parameter, like an unused one, gets its statistics when it is used next.
        self.asked.update(p for p in set(due).difference(wanted) if p in held)
        if not (self.count or self.left_out or self.warned):
            self.warned = any(p in held and p.grad is not None for p in wanted)
            if self.warned:
                warn_the_caller(UNOBSERVED + self.hint)
        return means

    @property
    def lacks(self) -> bool:
        """Whether this process should have observed an output, and has not."""
        return self.samples and not (self.count or self.left_out)

    def note_lack(self, text: str, wanted: Iterable[Tensor], held: Container[Tensor]) -> None:
        """Refuses first statistics if a process lacks an output; warns once of later ones.

        At first all processes know it, because they ask each other. Later perhaps only the process
        that lacks one.
        """
        if not any(p in held for p in wanted):
            raise RuntimeError(text)
        if not self.warned:
            self.warned = True
            warn_the_caller(f"{text} (warned once)")

    def means(self, held: Container[Tensor]) -> Mapping[Tensor, Any]:
        """The means over this process's observations."""
        raise NotImplementedError

    def pooled(
        self, processes: Processes, wanted: Sequence[Tensor], held: Container[Tensor]
    ) -> Mapping[Tensor, Any]:
        """The means over the observations of all processes; ``wanted`` is the same in all.

        Which parameters they reached is asked only if it may matter, because the host waits for the
        answer: see ``asks``. Otherwise the device finds out.
        """
        raise NotImplementedError

    def asks(self, wanted: Sequence[Tensor], held: Container[Tensor]) -> bool:
        """Whether processes must ask each other: while there are parameters without statistics, and
        where DistributedDataParallel looks for unused parameters.
        """
        return self.partial or not self.agreed or any(p not in held for p in wanted)

    def anywhere(
        self, processes: Processes, wanted: Sequence[Tensor], *groups: Container[Tensor]
    ) -> tuple[bool, list[list[Tensor]]]:
        """Whether any process observed something; of each group the wanted that any process has."""
        reached = [p in group for group in groups for p in wanted]
        flags = [self.count > 0, self.lacks, self.partial, *reached]
        observed, lack, partial, *found = processes.anywhere(flags, wanted[0].device)
        if observed:
            self.some_lack, self.partial, self.agreed = bool(lack), bool(partial), True
        n = len(wanted)
        parts = [found[n * k : n * (k + 1)] for k in range(len(groups))]
        return bool(observed), [list(compress(wanted, part)) for part in parts]

    def use_up(self) -> None:
        """See ``Empirical.use_up``."""
        super().use_up()
        self.count, self.attached, self.hint, self.comparisons = 0, 0, "", []
        self.left_out = self.some_lack = False


@dataclass
class Sampled(Observed):
    """Gradients at labels sampled from the model's own distribution."""

    # Sums of gradients over the observations, by parameter; this process's pieces if it is sharded.
    totals: dict[Tensor, Any] = field(default_factory=dict)
    # How many observations are in the sums. One that is not finite is left out if a finite one
    # exists; a fully masked one is never counted.
    summed: int | Tensor = 0

    def wanted(self, due: Sequence[Tensor]) -> list[Tensor]:
        """See ``Empirical.wanted``."""
        return [p for p in due if p.requires_grad]

    def observe(
        self, optimizer: Any, output: Any, wanted: list[Tensor], processes: Processes
    ) -> None:
        """Samples labels at an output and accumulates the gradients of their loss.

        The optimizer has the settings ``likelihood`` and ``seed``.
        """
        if processes.is_sharded and self.count:  # pieces of sharded gradients are not added up
            return
        index = processes.global_index(self.count)
        loss = _loss(optimizer, output, "step", optimizer.param_groups[0]["step"], index)
        if any(replica.find_unused_parameters for replica in checked_replicas(loss)):
            self.partial = True
        check_graph(loss, retain_graph=True)
        scale = _scale(optimizer, loss, output, processes)
        found = processes.gradients(loss, wanted, retain_graph=True, scale=scale)
        observed = {p: g for p, g in found.items() if g is not None}
        # An output may miss a few parameters, but not all of the optimizer's.
        groups = Groups(optimizer.param_groups)
        if len(wanted) == len(groups.modelled) or not (observed or processes.is_sharded):
            check_reached(observed or leaves_of(loss).intersection(groups.params))
        if not optimizer.param_groups[0]["step"]:  # after a skipped step once more
            self.comparisons = watched(optimizer.likelihood, output, optimizer.param_groups)
        self.add(observed, wanted, self.counted(optimizer, output))

    def counted(self, optimizer: Any, output: Any) -> int | Tensor:
        """See ``Empirical.counted``."""
        share = share_counted(optimizer.likelihood, output)
        return (share > 0).int() if isinstance(share, Tensor) else 1

    def add(
        self,
        observed: Mapping[Tensor, Tensor],
        asked: Iterable[Tensor],
        count: int | Tensor = 1,
    ) -> None:
        """Adds an observation to the sums; if only one of the two is finite, it alone is kept.

        ``count`` is 1, or 0 if every row is masked; the gradients are then zero.
        """
        totals, total_summed = dict(observed), self.summed + count
        if self.totals and observed:
            old, new = all_finite(self.totals.values()), all_finite(observed.values())

            def chosen(earlier: Any, later: Any, both: Any, device: torch.device) -> Tensor:
                later = torch.where(old.to(device), both, later)
                return torch.where(new.to(device), later, earlier)

            for param, gradient in observed.items():
                if param in self.totals:
                    # Half precision adds up in float32. Out of place: autograd may share gradients.
                    earlier = self.totals[param].to(state_dtype(param))
                    totals[param] = chosen(earlier, gradient, earlier + gradient, param.device)
            total_summed = chosen(self.summed, count, total_summed, old.device)
        self.totals.update(totals)
        self.summed = total_summed
        self.asked.update(asked)
        self.count += 1

    def gradients(
        self,
        processes: Processes,
        due: Sequence[Tensor],
        with_gradients: Container[Tensor],
        held: Container[Tensor],
    ) -> Mapping[Tensor, Any]:
        """See ``Empirical.gradients``; warns of first ones that are zero."""
        if not processes.is_sharded and not any(p in held for p in due) and self.summed:
            _warn_of_zeros(list(self.totals.values()))
        return super().gradients(processes, due, with_gradients, held)

    def means(self, held: Container[Tensor]) -> Gradients:
        """See ``Observed.means``."""
        n = self.summed
        if isinstance(n, int) and n == 1:
            return dict(self.totals)
        return {
            p: total / (n.to(total.device) if isinstance(n, Tensor) else n)
            for p, total in self.totals.items()
        }

    def pooled(
        self, processes: Processes, wanted: Sequence[Tensor], held: Container[Tensor]
    ) -> Gradients:
        """See ``Observed.pooled``. If not asked, a parameter not reached has a gradient of zero."""
        reached = list(wanted)
        if processes.is_sharded or self.asks(wanted, held):
            observed, (reached,) = self.anywhere(processes, wanted, self.totals)
            if not observed:
                return {}
        self.asked.update(wanted)
        if not reached:
            return {}
        means, self.summed = processes.mean(reached, self.totals, self.summed)
        if self.count or self.summed:  # the host waits only if it observed nothing
            self.count = max(self.count, 1)
        return means

    def batches(
        self, optimizer: Any, outputs: Iterable[Any], processes: Processes
    ) -> Iterator[Any]:
        """See ``Empirical.batches``. Several processes take all: they go through them together."""
        return (
            iter(outputs) if processes.is_distributed else with_rows(optimizer.likelihood, outputs)
        )

    def batch_loss(
        self, optimizer: Any, output: Any, index: int, processes: Processes
    ) -> tuple[Tensor, float]:
        """See ``Empirical.batch_loss``."""
        loss = _loss(optimizer, output, "warm start", processes.global_index(index))
        check_graph(loss, retain_graph=False)
        return loss, _scale(optimizer, loss, output, processes)

    def missed_after(
        self, reached: Container[Tensor], grads: Gradients, *, is_sharded: bool
    ) -> dict[Tensor, int]:
        """See ``Empirical.missed_after``."""
        known = dict.fromkeys(self.asked, IDLE) | self.missed
        missed = {p: status for p, status in known.items() if p not in reached}
        for p, status in missed.items():
            if status == LOSS_ONLY:
                continue
            has_gradient, gradient = p in grads, grads.get(p)
            if gradient is not None and not is_sharded:  # a piece does not show the whole
                has_gradient = bool(gradient.any())  # ``zero_grad`` may have left zeros
            if has_gradient:
                missed[p] = LOSS_ONLY if p in self.asked else PATIENCE
            elif p in self.asked:
                missed[p] = max(IDLE, status - 1)
        return missed

    def saved(self, numbers: Mapping[Tensor, int]) -> dict[str, Any]:
        """See ``Empirical.saved``."""
        return {
            "totals": {numbers[p]: total for p, total in self.totals.items() if p in numbers},
            "number": self.summed,
            "asked": sorted(numbers[p] for p in self.asked if p in numbers),
            "count": self.count,
            "attached": self.attached,
        }

    def loaded(self, saved: Any, params: Mapping[int, Tensor]) -> dict[str, Any]:
        """See ``Empirical.loaded``."""
        fields = ("totals", "asked", "number", "count", "attached")
        totals, asked, *counts = checkpoint.entries_of("['observed']", saved, fields)
        found: dict[str, Any] = {"totals": {}}
        by_number = checkpoint.by_number("['observed']['totals']", totals, params)
        for number, total in by_number.items():
            param = params[number]
            shape = tuple(total.shape) if isinstance(total, Tensor) else total
            if shape != tuple(param.shape):
                raise ValueError(
                    f"state_dict['observed'] must have a gradient of shape {tuple(param.shape)} "
                    f"for parameter {number}, got {shape!r}"
                )
            wide = state_dtype(param)
            dtype = total.dtype if state_dtype(total) == wide else wide
            found["totals"][param] = checkpoint.copied(total, param.device, dtype)
        numbers = checkpoint.numbers_in("['observed']['asked']", asked, params)
        found["asked"] = {params[n] for n in numbers}
        for name, count in zip(fields[2:], counts, strict=True):
            field_name = "summed" if name == "number" else name
            found[field_name] = checkpoint.checked_count(f"['observed'][{name!r}]", count)
        return found

    def use_up(self) -> None:
        """See ``Empirical.use_up``."""
        super().use_up()
        self.totals, self.summed = {}, 0


def warned_of_batch_norm(outputs: Iterable[Any]) -> Iterator[Any]:
    """The outputs; warns if the forward of the first has changed running statistics."""
    for index, output in enumerate(outputs):
        tensors = [] if index else [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if any(map(changed_batch_norm, tensors)):
            warn_the_caller(
                "outputs: batch norm in training mode changes its running statistics; "
                "warm_start((model(x) for x in batches), model=model) restores them"
            )
        yield output


def _loss(optimizer: Any, output: Any, *key: int | str) -> Tensor:
    """-log p at labels from the random stream that the seed and ``key`` name."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    return loss_at_samples(optimizer.likelihood, output, optimizer.seed, key, devices)


def _scale(optimizer: Any, loss: Tensor, output: Any, processes: Processes) -> float:
    """The scale of a loss for its backward."""
    if callable(optimizer.likelihood) or not shows_float16(loss):
        return 1.0
    # Sharded gradients are averaged over processes, whose batch sizes may differ.
    examples = example_count(optimizer.likelihood, output)
    return sample_scale(LARGEST_SCALE if processes.is_sharded else examples)


def _warn_of_zeros(gradients: list[Tensor]) -> None:
    """Warns if the first statistics would all be zero; the host waits."""
    if gradients and not any(norm.any() for norm in torch._foreach_norm(gradients)):
        warn_the_caller(
            "the gradients for the first statistics are all zero: the loss at sampled labels does "
            "not change with the weights"
        )
