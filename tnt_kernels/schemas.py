"""Every operator's schema, stated once.

The C++, Triton and reference implementations all register against these; each schema names what
it mutates. PyTorch schemas have no nested lists, so what the public functions in ``ops`` take as
``stats[t][i]`` arrives here flat, tensor after tensor, mode after mode. Where the number of modes
cannot be read off another argument, ``orders`` gives it, one integer per tensor.

Numbers that a captured graph must be able to change (``decay``, ``damping``, ``lr``, ...) are 0-dim
tensors, on the CPU or on the device of the lists. That also gives the dispatcher something to
dispatch on when every list is empty.
"""

import torch

NAMESPACE = "tnt_kernels"

SCHEMAS = {
    "gram_ema_": "(Tensor(a!)[] stats, Tensor[] tensors, Tensor decay) -> ()",
    "damped_inverse": (
        "(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, bool relative) -> Tensor"
    ),
    "inverse_root": (
        "(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, int[] roots) -> Tensor"
    ),
    "mode_products": "(Tensor[] tensors, Tensor[] factors) -> Tensor[]",
    "preconditioned_step_": (
        "(Tensor(a!)[] params, Tensor(b!)[] momenta, Tensor[] grads, Tensor[] factors, "
        "Tensor lr, Tensor momentum, Tensor weight_decay) -> ()"
    ),
    "grafted_directions_": (
        "(Tensor(a!)[] momenta, Tensor(b!)[] second_moments, Tensor(c!)[] out, Tensor[] grads, "
        "Tensor[] factors, Tensor momentum, Tensor counts, float second_decay, float eps) -> Tensor"
    ),
}


def define() -> torch.library.Library:
    """Declares every operator. The result must be kept alive for as long as they are used."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, signature in SCHEMAS.items():
        library.define(name + signature)
    return library
