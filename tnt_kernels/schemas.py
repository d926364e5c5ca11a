"""Every operator's schema, stated once.

The C++, Triton and reference implementations register against these schemas, which mark mutated
arguments. PyTorch schemas have no nested lists: ``stats[t][i]`` of the public functions in ``ops``
is flat here, tensor after tensor, mode after mode. ``orders`` gives the number of modes of each
tensor if no other argument does.

Numbers that a captured graph must be able to change (``decay``, ``damping``, ``lr``, ...) are 0-dim
tensors, on the CPU or on the device of the lists. They also let the dispatcher select a device when
every list is empty.

Written lists come first. Direct calls on a CPU do not tell autograd that they wrote; ``ops`` does.
"""

import functools
import re

import torch

NAMESPACE = "tnt_kernels"

SCHEMAS = {
    "gram_ema_": "(Tensor(a!)[] stats, Tensor[] tensors, Tensor decay, Tensor[] factors) -> ()",
    "damped_inverse": (
        "(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, bool relative) -> Tensor"
    ),
    "inverse_root": (
        "(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, int[] roots, "
        "bool relative) -> Tensor"
    ),
    "mode_products": "(Tensor[] tensors, Tensor[] factors) -> Tensor[]",
    "preconditioned_step_": (
        "(Tensor(a!)[] params, Tensor(b!)[] momenta, Tensor[] grads, Tensor[] factors, "
        "Tensor lr, Tensor momentum, Tensor weight_decay) -> ()"
    ),
    "scaled_step_": (
        "(Tensor(a!)[] params, Tensor[] directions, Tensor lr, Tensor weight_decay, "
        "bool[] decayed, Tensor scales) -> ()"
    ),
    "grafted_directions_": (
        "(Tensor(a!)[] momenta, Tensor(b!)[] second_moments, Tensor(c!)[] out, Tensor[] grads, "
        "Tensor[] factors, Tensor momentum, Tensor counts, float second_decay, float eps, "
        "bool nesterov) -> Tensor"
    ),
}


def define() -> torch.library.Library:
    """Declares every operator, for as long as the returned library is alive."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, signature in SCHEMAS.items():
        library.define(name + signature)
    # Private: C++ reads a setting of Python's with it.
    library.define("_may_round() -> bool")
    return library


@functools.cache
def in_extension(name: str) -> bool:
    """Whether C++ implements an operator on the CPU."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CPU")


def signatures() -> str:
    """The schemas without names, a line for each, as the C++ operators state their types."""
    lines = "".join(f"{name}{signature}\n" for name, signature in SCHEMAS.items())
    return re.sub(r"\(\w!\)| \w+(?=[,)])", "", lines)
