"""What KFAC has observed since the last step, and which layers its outputs did not reach."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.kfac.layers import Layer
from tnt_optim.kfac.pooling import pooled_sums
from tnt_optim.kfac.statistics import LayerSums


@dataclass
class Observations:
    """Layers are known by their numbers.

    Attributes:
        sums: of each layer, over the examples of all outputs that reached it.
        count: how many outputs there were while layers were asked for, also those that can have
            reached none: they number the draws, in one process as in several.
        asked: layers that an output was to reach.
        called: layers called in a forward pass while statistics of theirs were wanted.
        unreached: layers without statistics that no output reached at the last step that asked for
            them, each with whether it was called then: if so, the next outputs will miss it, too.
    """

    sums: dict[int, LayerSums] = field(default_factory=dict)
    count: int = 0
    asked: set[int] = field(default_factory=set)
    called: set[int] = field(default_factory=set)
    unreached: dict[int, bool] = field(default_factory=dict)

    def add(self, found: Mapping[int, LayerSums], asked: Iterable[int]) -> None:
        """Takes in the sums of one more output, which was to reach the layers ``asked``."""
        self.asked.update(asked)
        for layer, sums in found.items():
            earlier = self.sums.get(layer)
            self.sums[layer] = sums if earlier is None else earlier + sums
        self.count += 1

    def pool(
        self,
        team: ProcessGroup,
        wanted: Sequence[int],
        layers: Sequence[Layer],
        held: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """Takes the sums over all processes in place of this one's.

        Whom the outputs reached is asked only while there are first statistics to come, when a step
        may wait for the answer. Otherwise the sums tell, on the device.

        Args:
            team: the processes.
            wanted: whose statistics are due; the same in all.
            layers: all of them.
            held: the statistics of those that have some.
        """
        if not wanted:
            return
        reached = list(wanted)
        if any(layer not in held for layer in wanted):
            flags = [self.count > 0]
            for who in (self.sums, self.called):
                flags += [layer in who for layer in wanted]
            anyone, *found = team.anywhere(flags, layers[0].weight.device)
            if not anyone:
                return
            in_sums, were_called = found[: len(wanted)], found[len(wanted) :]
            reached = [i for i, is_in in zip(wanted, in_sums, strict=True) if is_in]
            self.called = {i for i, was in zip(wanted, were_called, strict=True) if was}
            held = {}  # each has been reached by some process
        sums: dict[int, LayerSums] = {}
        if reached:
            chosen = {layer: layers[layer] for layer in reached}
            sums, observers = pooled_sums(team, chosen, self.sums, self.count, held)
            if not self.count and not observers:  # it waits for the answer, where it must
                return
        self.sums, self.count = sums, max(self.count, 1)
        self.asked.update(wanted)

    def may_wait(self, layer: int) -> bool:
        """Whether a layer without statistics was asked for, so that no one forgot it."""
        return layer in self.asked or layer in self.unreached

    def note_unreached(self, has_statistics: Callable[[int], bool]) -> None:
        """Remembers who was missed, at the end of a step that went well."""
        missed = {layer: layer in self.called for layer in self.asked}
        known = {**self.unreached, **missed}
        self.unreached = {i: called for i, called in known.items() if not has_statistics(i)}

    def use_up(self) -> None:
        """Forgets all but who was missed."""
        self.sums, self.count, self.asked, self.called = {}, 0, set(), set()
