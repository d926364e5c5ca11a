"""What KFAC has observed since the last step, and which layers its outputs did not reach."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tnt_optim.layer_statistics import LayerSums


@dataclass
class Observations:
    """Layers are known by their numbers.

    Attributes:
        sums: of each layer, over the examples of all outputs that reached it.
        count: how many outputs there were.
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

    def add(self, found: Mapping[int, LayerSums]) -> None:
        """Takes in the sums of one more output."""
        for layer, sums in found.items():
            earlier = self.sums.get(layer)
            self.sums[layer] = sums if earlier is None else earlier + sums
        self.count += 1

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
