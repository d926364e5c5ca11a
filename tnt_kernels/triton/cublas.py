"""Mode products by cuBLAS, where ``python -m tnt_kernels tune`` has measured that it is faster.

The choice is by class: dtype, precision, size, and whether Triton's loads are wide. A
table in the user's cache, one for each GPU and version of PyTorch and Triton, has the measured
classes. All other tensors stay with Triton, and so does the elementwise work after a product.
"""

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from tnt_kernels.triton import launch, version

LEAST, MOST = 256, 8192  # rows and columns of the smallest and of the largest class
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Class:
    """The matrices that share one measurement."""

    dtype: str  # of the tensor, as "bfloat16"
    precision: str  # of float32 products, as Triton names it
    size: int  # a power of two near the root of the number of elements
    wide: bool = True  # False if a size is no multiple of 16 bytes: Triton's loads are then narrow


# The classes for which cuBLAS is used without a table: those where it was faster on an H200
# (bench/results/gpu). Narrow loads were measured on faces_ae, whose layers have 625 inputs.
RULE = frozenset(
    [
        *(
            Class(dtype, "tf32", size)
            for dtype in ("float32", "bfloat16", "float16")
            for size in (2048, 4096, 8192)
        ),
        *(
            Class("float32", precision, size, wide=False)
            for precision in ("tf32x3", "tf32")
            for size in (1024, 2048, 4096, 8192)
        ),
    ]
)


def class_of(dtype: torch.dtype, precision: str, shape: Sequence[int]) -> Class:
    """The class of a matrix."""
    size = 2 ** round(math.log2(math.prod(shape)) / 2)
    name = str(dtype).removeprefix("torch.")
    wide = all(d * dtype.itemsize % launch.VECTOR_BYTES == 0 for d in shape)
    return Class(name, precision, min(max(size, LEAST), MOST), wide)


def identity(device: torch.device) -> dict[str, str] | None:
    """What a table is valid for; None if the device needs no table."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_name(device)
    return {"gpu": gpu, "torch": str(torch.__version__), "triton": version()}


def path_of(valid_for: dict[str, str]) -> Path:
    """The file of a table."""
    folder = os.environ.get("TNT_CACHE")
    if not folder:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(cache, "tnt_kernels")
    name = "_".join(f"{key}-{value}" for key, value in valid_for.items())
    return Path(folder) / (re.sub(r"[^\w.+-]+", "-", name) + ".json")


@functools.cache
def chosen(device: torch.device) -> frozenset[Class]:
    """The classes for which a device uses cuBLAS; warns once of a table that cannot be used."""
    valid_for = identity(device)
    if valid_for is None:
        return RULE
    path = path_of(valid_for)
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if {key: table[key] for key in valid_for} != valid_for:
            raise ValueError("it is of another GPU or another version")
        rows = [row for row in table["classes"] if row["cublas"]]
        rows = [row for row in rows if row.get("operation") != "gram"]  # of earlier versions
        return frozenset(Class(*(row[field.name] for field in fields(Class))) for row in rows)
    except FileNotFoundError:
        return RULE
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"{path} is not used, the built-in rule applies instead: {error!r}; "
            "`python -m tnt_kernels tune` writes a new table",
            RuntimeWarning,
            stacklevel=2,
        )
        return RULE


_forced: bool | None = None


@contextmanager
def only(used: bool) -> Iterator[None]:
    """Within it cuBLAS is used for all classes or for none, to measure both."""
    global _forced
    before = _forced
    launch.forget_plans()  # they hold choices
    _forced = used
    try:
        yield
    finally:
        _forced = before
        launch.forget_plans()


def choose(device: torch.device, precision: str, source: launch.Layout) -> bool:
    """Whether cuBLAS multiplies a tensor with a full mode by its factors."""
    if not _fits(source) or source.dtype not in DTYPES:
        return False
    if _forced is not None:
        return _forced
    return class_of(source.dtype, precision, source.shape) in chosen(device)


def _fits(layout: launch.Layout) -> bool:
    """Whether a tensor is a large matrix that PyTorch passes to cuBLAS without a copy."""
    if len(layout.shape) != 2 or min(layout.shape) < LEAST:
        return False
    return any(
        layout.strides[dense] == 1 and layout.strides[1 - dense] >= layout.shape[dense]
        for dense in (0, 1)
    )


def check(device: torch.device) -> None:
    """Raises, before an operator writes, what cuBLAS would raise at its products.

    PyTorch refuses cuBLAS under deterministic algorithms without CUBLAS_WORKSPACE_CONFIG, and takes
    cuBLAS's workspace at a stream's first product. A product of two numbers finds out, at every
    call: the setting may change, and PyTorch may have freed the workspace. It costs one small
    launch in front of large products and does not wait for the device.
    """
    one = torch.empty(1, 1, dtype=torch.float32, device=device)
    torch.mm(one, one, out=torch.empty_like(one))


def chain(tensor: Tensor, factors: Sequence[Tensor], out: Tensor) -> launch.Prepared:
    """P = A_1 G A_2^T, contiguous; a diagonal factor scales."""
    left, right = factors
    count = tensor.numel()

    def start(scratch: Tensor) -> None:
        inner = scratch[: count * out.itemsize].view(out.dtype).view(out.shape)
        # Half precision widens in P's own memory, which only the second product writes.
        wide = tensor if tensor.dtype == out.dtype else out.copy_(tensor)
        if right.dim() == 1:
            torch.mul(wide, right, out=inner)
        else:
            torch.mm(wide, right.mT, out=inner)
        if left.dim() == 1:
            torch.mul(left[:, None], inner, out=out)
        else:
            torch.mm(left, inner, out=out)

    return launch.Prepared(count * out.itemsize, start)
