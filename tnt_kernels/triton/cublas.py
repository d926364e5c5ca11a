"""Mode products of large matrices by cuBLAS, where its TF32 is faster than Triton's.

On an H200 it reached 370 to 393 TFLOP/s where both of its operands are dense along the sum, and
Triton's loop 270 (bench/results/gpu). The choice depends on shapes and the precision only, so all
replicas of a model compute the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnt_kernels.triton.launch import Layout, Prepared

LEAST = 1024  # rows and columns


def is_faster(tensor: Layout, factors: Sequence[Layout], setting: str) -> bool:
    """Whether cuBLAS multiplies a tensor by its factors; ``setting`` is Triton's precision."""
    is_large = len(tensor.shape) == len(factors) == 2 and min(tensor.shape) >= LEAST
    is_dense = is_large and tensor.strides == (tensor.shape[1], 1)
    full = all(len(factor.shape) == 2 for factor in factors)
    return setting == "tf32" and tensor.dtype == torch.float32 and is_dense and full


def check(device: torch.device) -> None:
    """Raises, before an operator writes, what cuBLAS would raise at its products.

    PyTorch refuses cuBLAS under deterministic algorithms without CUBLAS_WORKSPACE_CONFIG, and takes
    cuBLAS's workspace at a stream's first product. A product of two numbers finds out, at every
    call: the setting may change, and PyTorch may have freed the workspace. It costs one small
    launch in front of large products and does not wait for the device.
    """
    one = torch.empty(1, 1, dtype=torch.float32, device=device)
    torch.mm(one, one, out=torch.empty_like(one))


def chain(tensor: Tensor, factors: Sequence[Tensor], out: Tensor) -> Prepared:
    """P = A_1 (A_2 G^T)^T, contiguous: in both products rows of two matrices meet."""
    left, right = factors

    def start(scratch: Tensor) -> None:
        inner = scratch[: out.nbytes].view(out.dtype).view(out.shape[::-1])
        torch.mm(right, tensor.mT, out=inner)
        torch.mm(left, inner.mT, out=out)

    return Prepared(out.nbytes, start)
