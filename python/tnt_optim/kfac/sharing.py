"""How processes share the making of KFAC's inverses: each layer's are made by one and sent to all.

Every process has all statistics and, afterwards, all inverses: nothing but work is shared.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tnt_optim.distributed.ownership import Load, assign
from tnt_optim.distributed.process_group import ProcessGroup
from tnt_optim.distributed.replicated import Replicated
from tnt_optim.kfac.inverses import Inverse, Matrices

SHARDS = (None, "inverses")


def owners(stats: Mapping[Tensor, Sequence[Tensor]], processes: int) -> dict[Tensor, int]:
    """Who makes the inverses of which layer, by weight: everyone about as much.

    Args:
        stats: [G, A] of each layer whose inverses are to be made.
        processes: how many there are.
    """
    loads = [Load(float(sum(len(matrix) ** 3 for matrix in pair))) for pair in stats.values()]
    return dict(zip(stats, assign(loads, [Load()] * processes), strict=True))


def make_shared(
    team: ProcessGroup,
    inverse: Inverse,
    stats: Mapping[Tensor, list[Tensor]],
    damping: float | Tensor,
    out: Matrices | None,
) -> tuple[Matrices, Tensor]:
    """Makes inverses as ``inverse.make`` does, each layer's in one process.

    Args:
        team: the processes.
        inverse: the way to invert.
        stats: [G, A] by the layers' weights, on one device, the same in all processes.
        damping: as for ``inverse.make``.
        out: as for ``inverse.make``.

    Returns:
        Factors and codes, of the same bits in all processes.
    """
    sharing = Replicated(team, "inverses", owners(stats, team.size).__getitem__)
    own = sharing.owned(stats)
    target = dict(zip(stats, out, strict=True)) if out is not None else None
    made: dict[Tensor, list[Tensor]] = dict(target or {})
    codes = next(iter(stats.values()))[0].new_zeros(0)
    if own:
        mine = None if target is None else [target[weight] for weight in own]
        factors, codes = inverse.make([stats[weight] for weight in own], damping, mine)
        # Of one layout everywhere: products with eigenvectors by columns would round otherwise.
        rows = [[factor.contiguous() for factor in each] for each in factors]
        made.update(zip(own, rows, strict=True))
    for weight, (g, a) in stats.items():
        if weight not in made:
            made[weight] = [g.new_empty(shape) for shape in inverse.shapes(len(g), len(a))]
    weights = list(stats)
    told = sharing.codes(weights, own, codes)
    sharing.send_factors(weights, {weight: {"factors": made[weight]} for weight in weights})
    return [made[weight] for weight in weights], told
