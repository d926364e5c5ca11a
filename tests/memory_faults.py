"""Programs of tests/system/test_out_of_memory.py, whose allocations fail one after the other.

Each prints how many allocations failed, and exits with an error if one of them was not harmless.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from cases import DTYPES, LAYOUTS, STATE_DTYPES
from failing_memory import Allocator, fail_every_allocation
from operators import INVERSES, STRIDED_WRITTEN, call
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tnt_kernels
from tnt_optim import KFAC, TNT, Shampoo, modes

# ------------------------------------------------------------------ operators


def operator(variant: str, layout: str) -> int:
    """Of four dtypes, full and diagonal modes, factors that fail, and large modes."""
    dtypes = STATE_DTYPES if variant in INVERSES else DTYPES
    shapes = [(9, 5), (7,), (3, 4, 5), (65, 61), (1, 210), (230, 40)]
    given = call(variant, shapes, "mixed", dtypes).map(
        lambda key, tensor: LAYOUTS[layout](tensor) if key in STRIDED_WRITTEN else tensor
    )
    if variant in INVERSES:
        given.arguments["stats"][1][0][0] = -100.0
    return fail_every_allocation(given, tnt_kernels, counting=Allocator)


# ------------------------------------------------------------------ steps

Make = Callable[["Net"], Any]
EVERY_STEP: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1, "interval_warmup": 0}


class Net(nn.Module):
    """A convolution, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 3, 3), nn.LayerNorm(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images."""
        result: Tensor = self.out(self.norm(self.conv(x).flatten(2).mean(2)))
        return result

    def groups(self) -> list[dict[str, Any]]:
        """Two parameter groups."""
        rest = [*self.norm.parameters(), *self.out.parameters()]
        return [{"params": self.conv.parameters()}, {"params": rest, "weight_decay": 0.1}]


def empirical(net: Net, **settings: Any) -> TNT:
    """TNT from the training gradients."""
    return TNT(net.groups(), **EVERY_STEP, **settings)


OPTIMIZERS: dict[str, Make] = {
    "sampled": lambda net: TNT(net.groups(), likelihood="categorical", **EVERY_STEP),
    "empirical": empirical,
    "paper": lambda net: TNT.paper(net.groups(), likelihood="categorical", **EVERY_STEP),
    "rms": lambda net: empirical(net, graft="rms", estimator="moments"),
    "sgd": lambda net: empirical(net, graft="sgd", precondition_1d=True, maximize=True),
    "blocks": lambda net: empirical(net, block_size=2, max_factor_dim=3),
    "stochastic": lambda net: empirical(net.bfloat16(), rounding="stochastic"),
    "master": lambda net: empirical(net.bfloat16(), rounding="master"),
    "shampoo": lambda net: Shampoo(net.groups(), **EVERY_STEP),
    "kfac": lambda net: KFAC(net, likelihood="categorical", **EVERY_STEP),
    "kfac paper": lambda net: KFAC.paper(net, likelihood="categorical", **EVERY_STEP),
    "eigenbasis": lambda net: KFAC(
        net, graft="rms", inverse="eigenbasis", likelihood="categorical", **EVERY_STEP
    ),
}


def trained(make: Make, steps: int) -> tuple[Net, Any]:
    """A model and its optimizer after some steps."""
    torch.manual_seed(0)
    net = Net()
    opt = make(net)
    for number in range(steps):
        backward(net, opt, number)
        opt.step()
    return net, opt


def backward(net: Net, opt: Any, number: int) -> None:
    """What comes before a step."""
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(number))
    opt.zero_grad()
    output = net(x.to(net.out.weight.dtype))
    opt.observe(output)
    nn.functional.cross_entropy(output.float(), torch.arange(5) % 4).backward()


def values(net: Net, opt: Any) -> list[Tensor]:
    """Copies of the parameters and of all tensors of the state."""
    found = tree_leaves([list(net.parameters()), list(opt.state.values())])
    return [t.detach().clone() for t in found if isinstance(t, Tensor)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all are equal to the bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def step(name: str, number: int, bucket: int) -> tuple[int, int]:
    """Fails every allocation of step ``number``; repeats it, and takes one more.

    Returns:
        How many failures left all parameters as they were, and how many came in the update.
    """
    make, ends = OPTIMIZERS[name], [0, 0]
    modes._BUCKET = bucket
    wanted = values(*trained(make, number + 2))
    while True:
        net, opt = trained(make, number)
        backward(net, opt, number)
        before = [p.detach().clone() for p in net.parameters()]
        try:
            with Allocator(sum(ends) + 1):
                opt.step()
        except (MemoryError, RuntimeError) as error:
            ends[opt.has_unfinished_update] += 1
            if not opt.has_unfinished_update:
                assert equal(before, list(net.parameters())), error
        else:
            break
        for again in (number, number + 1):
            backward(net, opt, again)
            opt.step()
        assert equal(values(net, opt), wanted), f"allocation {sum(ends)}"
    return ends[0], ends[1]


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(int(sys.argv[2]))
    if sys.argv[1] == "operator":
        print(operator(*sys.argv[3:]))
    else:
        print(*step(sys.argv[3], *map(int, sys.argv[4:])))
