"""Which process owns which parameter: pure functions of sizes.

The owner of a parameter keeps its statistics and makes its factors, for all processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What a parameter, or all those of one owner, cost.

    Attributes:
        work: of its factors, sum of d^3 over the full modes, and of the product with them,
            numel(W) d each, in multiplications.
        size: of what only the owner keeps, in bytes.
    """

    work: float = 0.0
    size: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.work + other.work, self.size + other.size)


def load_of(shapes: Iterable[Sequence[int]], numel: int, itemsize: int, moments: int) -> Load:
    """What a parameter costs its owner.

    Args:
        shapes: of its statistics, (d, d) or (d,).
        numel: how many numbers it has.
        itemsize: bytes of a number of its state.
        moments: how many tensors like the parameter the owner alone keeps.
    """
    modes = [(shape[0], len(shape) == 2) for shape in shapes]
    # One refresh counts as much as one product: T2 decides what they really weigh.
    work = sum(float(d) ** 3 + float(numel) * d for d, full in modes if full)
    numbers = sum(2 * d * (d if full else 1) for d, full in modes) + moments * numel
    return Load(work + numel, float(numbers * itemsize))


def assign(loads: Sequence[Load], taken: Sequence[Load]) -> list[int]:
    """Owners of parameters, so that the most loaded one has as little as a greedy choice finds.

    The largest first, each to whom it then makes least loaded, in its share of the work or of the
    bytes, whichever is larger. Equal calls give equal results.

    Args:
        loads: of the parameters.
        taken: what every process has already.

    Returns:
        The owner's number, below ``len(taken)``, for each of ``loads``.

    >>> assign([Load(w, w) for w in (2, 3, 5, 4)], [Load(), Load()])
    [0, 1, 0, 1]
    """
    total = sum((*loads, *taken), Load())

    def share(load: Load) -> float:
        return max(load.work / (total.work or 1.0), load.size / (total.size or 1.0))

    owned, owners = list(taken), [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: (-share(loads[i]), i)):
        candidates = [share(own + loads[index]) for own in owned]
        owner = candidates.index(min(candidates))
        owners[index], owned[owner] = owner, owned[owner] + loads[index]
    return owners
