"""What this machine can do at most, measured in the run that is held against it.

A large OpenBLAS sgemm and ssyrk, and a copy of memory, each with as many threads as torch uses. The
best of several is the limit. Torch's own product is measured beside them: it is what every baseline
in plain torch stands on. Without ``scipy-openblas32`` torch's own product stands in for both
(for a symmetric product then without using the symmetry), and the record says so.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels.work import Work

COPY_NUMBERS = 1 << 26  # 256 MiB of float32, beyond every cache


@dataclass(frozen=True)
class Limits:
    """The machine's limits, in flops and bytes a second.

    Attributes:
        blas: what computed the products.
        threads: how many threads it had.
        size: the side of the square matrices.
        sgemm: useful flops a second of a product.
        ssyrk: useful flops a second (one triangle) of a symmetric product.
        copy: bytes a second, read and written both counted.
        torch_sgemm: useful flops a second of torch's own product.
    """

    blas: str
    threads: int
    size: int
    sgemm: float
    ssyrk: float
    copy: float
    torch_sgemm: float

    def seconds(self, work: Work, *, symmetric: bool) -> float:
        """The least time for ``work``: at the limit of its products, or of memory if later."""
        rate = self.ssyrk if symmetric else self.sgemm
        return max(work.useful_flops / rate, work.bytes / self.copy)

    def binding(self, work: Work, *, symmetric: bool) -> str:
        """Which of the limits that is."""
        rate = self.ssyrk if symmetric else self.sgemm
        name = "ssyrk" if symmetric else "sgemm"
        return name if work.useful_flops / rate > work.bytes / self.copy else "copy"


def better(first: Limits, second: Limits) -> Limits:
    """Of every rate the higher one: what disturbs a measurement only slows it down."""
    rates = {
        name: max(getattr(first, name), getattr(second, name))
        for name in ("sgemm", "ssyrk", "copy", "torch_sgemm")
    }
    return replace(first, **rates)


def measure_limits(size: int = 4096, rounds: int = 3) -> Limits:
    """Measures them now; about four seconds on two cores."""
    a, b, c = (torch.randn(size, size) for _ in range(3))
    threads = torch.get_num_threads()
    library = _openblas()
    torch_sgemm = _least_seconds(lambda: torch.mm(a, b, out=c), rounds)
    if library is None:
        blas = "torch (scipy-openblas32 is not installed)"
        sgemm = torch_sgemm
        ssyrk = _least_seconds(lambda: torch.mm(a, a.mT, out=c), rounds)
    else:
        blas = f"OpenBLAS {_openblas_version(library)}"
        library.scipy_openblas_set_num_threads(threads)
        try:
            sgemm = _least_seconds(lambda: _sgemm(library, a, b, c), rounds)
            ssyrk = _least_seconds(lambda: _ssyrk(library, a, c), rounds)
        finally:
            # A blocking pool beside torch's own would slow down whatever runs next.
            library.scipy_openblas_set_num_threads(1)
    source = torch.randn(COPY_NUMBERS)
    target = torch.empty_like(source)
    copy = _least_seconds(lambda: target.copy_(source), max(rounds, 5))
    return Limits(
        blas=blas,
        threads=threads,
        size=size,
        sgemm=2 * size**3 / sgemm,
        ssyrk=size * size * (size + 1) / ssyrk,
        copy=2 * source.nbytes / copy,
        torch_sgemm=2 * size**3 / torch_sgemm,
    )


def _least_seconds(run: Callable[[], object], rounds: int) -> float:
    run()
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return min(samples)


def _openblas() -> ctypes.CDLL | None:
    try:
        package = importlib.import_module("scipy_openblas32")
    except ImportError:
        return None
    path = Path(package.get_lib_dir()) / package.get_library(fullname=True)
    return ctypes.CDLL(str(path))


def _openblas_version(library: ctypes.CDLL) -> str:
    library.scipy_openblas_get_config.restype = ctypes.c_char_p
    words = library.scipy_openblas_get_config().decode().split()
    return " ".join(word for word in words if word != "OpenBLAS")


def _sgemm(library: ctypes.CDLL, a: Tensor, b: Tensor, c: Tensor) -> None:
    """C = A B, square (column-major or row-major is the same work)."""
    n, one, zero = ctypes.c_int(a.shape[0]), ctypes.c_float(1), ctypes.c_float(0)
    reference = ctypes.byref
    library.scipy_sgemm_(
        *(b"N", b"N", reference(n), reference(n), reference(n), reference(one)),
        *(ctypes.c_void_p(a.data_ptr()), reference(n), ctypes.c_void_p(b.data_ptr())),
        *(reference(n), reference(zero), ctypes.c_void_p(c.data_ptr()), reference(n)),
        *(ctypes.c_size_t(1), ctypes.c_size_t(1)),  # lengths of the two strings
    )


def _ssyrk(library: ctypes.CDLL, a: Tensor, c: Tensor) -> None:
    """One triangle of C = A A^T."""
    n, one, zero = ctypes.c_int(a.shape[0]), ctypes.c_float(1), ctypes.c_float(0)
    reference = ctypes.byref
    library.scipy_ssyrk_(
        *(b"L", b"N", reference(n), reference(n), reference(one)),
        *(ctypes.c_void_p(a.data_ptr()), reference(n), reference(zero)),
        *(ctypes.c_void_p(c.data_ptr()), reference(n)),
        *(ctypes.c_size_t(1), ctypes.c_size_t(1)),
    )
