"""The limits of one device, measured in the run that is compared with them.

On a CPU: a large sgemm and ssyrk of OpenBLAS, the product of torch, which every baseline calls, and
a copy of memory, each with as many threads as torch uses. Without ``scipy-openblas32`` the product
of torch replaces both, and the record says so. On a GPU: a copy, and the products of torch in
float32, TF32 and bfloat16. The best of several samples is the limit.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tnt_kernels.benchmark.clock import Stopwatch
from tnt_kernels.benchmark.work import Work

COPY_NUMBERS = 1 << 26  # 256 MiB of float32, larger than every cache
# PyTorch's float32 matmul precision and the product that then limits a GPU.
_PRODUCT_OF = {"highest": "float32", "high": "tf32", "medium": "bf16"}

Limits = Mapping[str, Any]


@contextmanager
def matmul_precision(setting: str) -> Iterator[None]:
    """PyTorch's float32 matmul precision, set for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def binding(limits: Limits, work: Work, precision: str) -> tuple[str, float]:
    """The limit that binds, and the least seconds for ``work``.

    On a CPU it depends on whether the product is symmetric, on a GPU on the precision of float32
    products.
    """
    product = "ssyrk" if work.symmetric else "sgemm"
    if product not in limits:
        product = _PRODUCT_OF[precision]
    least = {product: work.flops / limits[product], "copy": work.bytes / limits["copy"]}
    name = max(least, key=lambda name: least[name])
    return name, least[name]


def better(first: Limits, second: Limits) -> dict[str, Any]:
    """The higher rate of each limit: a disturbance only slows a measurement down."""
    return {k: max(v, second[k]) if isinstance(v, float) else v for k, v in first.items()}


def finish(record: dict[str, Any], second: Limits) -> None:
    """Take the better of the record's limits and the second ones, and add them to its rows."""
    record["limits"] = better(record["limits"], second)
    for row in record["rows"]:
        if "work" in row:
            limit = binding(record["limits"], Work(*row["work"]), row["precision"])
            row["limit"], row["least_seconds"] = limit


def measure_limits(
    device: torch.device | str = "cpu", size: int = 4096, numbers: int = COPY_NUMBERS
) -> dict[str, Any]:
    """Flops a second of square products, and bytes a second (read and written) of a copy.

    Takes about four seconds on two cores of a CPU.
    """
    device = torch.device(device)
    stopwatch = Stopwatch(device)

    def least(run: Callable[[], object], rounds: int = 3) -> float:
        run()
        return min(stopwatch(run) for _ in range(rounds))

    a, b, c = (torch.randn(size, size, device=device) for _ in range(3))
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / least(lambda: target.copy_(source), 5)
    full, half = 2.0 * size**3, float(size * size * (size + 1))
    if device.type == "cuda":
        rates = {"copy": copy}
        for setting in ("highest", "high"):
            with matmul_precision(setting):
                rates[_PRODUCT_OF[setting]] = full / least(lambda: torch.mm(a, b, out=c), 10)
        a, b, c = (x.bfloat16() for x in (a, b, c))
        return {**rates, "bf16": full / least(lambda: torch.mm(a, b, out=c), 10), "size": size}
    rates = {"copy": copy, "torch_sgemm": full / least(lambda: torch.mm(a, b, out=c))}
    library = _openblas()
    if library is None:
        rates["sgemm"] = rates["torch_sgemm"]
        rates["ssyrk"] = half / least(lambda: torch.mm(a, a.mT, out=c))
    else:
        library.scipy_openblas_set_num_threads(torch.get_num_threads())
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        left, right, out = (ctypes.c_void_p(x.data_ptr()) for x in (a, b, c))
        row_major, plain, lower, n = 101, 111, 122, size

        def sgemm() -> None:
            """C = A B."""
            library.scipy_cblas_sgemm(
                *(row_major, plain, plain, n, n, n, one, left, n, right, n, zero, out, n)
            )

        def ssyrk() -> None:
            """One triangle of C = A A^T."""
            library.scipy_cblas_ssyrk(*(row_major, lower, plain, n, n, one, left, n, zero, out, n))

        rates["sgemm"], rates["ssyrk"] = full / least(sgemm), half / least(ssyrk)
        # A second pool of waiting threads would slow down the next benchmark.
        library.scipy_openblas_set_num_threads(1)
    blas = "torch" if library is None else "scipy-openblas32"
    return {"blas": blas, "size": size, **rates}


def _openblas() -> ctypes.CDLL | None:
    try:
        package = importlib.import_module("scipy_openblas32")
    except ImportError:
        return None
    path = Path(package.get_lib_dir()) / package.get_library(fullname=True)
    return ctypes.CDLL(str(path))
