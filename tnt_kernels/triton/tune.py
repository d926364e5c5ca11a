"""``python -m tnt_kernels tune``: measures each class both ways, on scratch copies."""

import datetime
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from tnt_kernels.triton import cublas
from tnt_kernels.triton.launch import precision, state_dtype
from tnt_kernels.triton.mode_products import mode_products

# Should the time run out, the sizes with the most to gain are done; 8192 may take seconds.
SIZES = (2048, 4096, 1024, 8192, 512, 256)
# cuBLAS must take less than this part of Triton's time: below are differences that do not repeat.
MARGIN = 0.95
# A model has many matrices of a small size, and Triton computes them in one call: so many are
# measured together that they have this many rows.
ROWS = 4096


def tune(device: torch.device, out: Path | None = None, seconds: float = 50.0) -> bool:
    """Measures, prints and records all classes on the current GPU; returns whether any was.

    The table goes to the cache, and to ``out``. It lacks classes that failed or were not reached in
    time: they use Triton.
    """
    rows: list[dict[str, Any]] = []
    seen: set[cublas.Class] = set()
    end = time.monotonic() + seconds
    print("dtype     precision   size  loads    Triton us   cuBLAS us  faster", flush=True)
    cases = itertools.product(cublas.DTYPES, SIZES, (True, False), ("ieee", "tf32"))
    try:
        for dtype, size, wide, setting in cases:
            if not wide and dtype != torch.float32:
                continue
            if time.monotonic() > end:
                print(f"time is up after {seconds:.0f} s; run again, compiled kernels are kept")
                break
            with _fp32_precision(setting):
                shape = (size, size) if wide else (size + 1, size + 1)
                one = cublas.class_of(dtype, precision(device), shape)
                if one not in seen and (row := _measured(one, dtype, device)):
                    rows.append(row)
                seen.add(one)
    finally:  # an interrupt keeps what is measured
        if rows:
            _save(rows, device, out)
    return bool(rows)


@contextmanager
def _fp32_precision(setting: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = setting
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _measured(one: cublas.Class, dtype: torch.dtype, device: torch.device) -> dict[str, Any] | None:
    """A row of the table, printed; None if the class cannot be measured."""
    loads = "wide" if one.wide else "narrow"
    label = f"{one.dtype:8}  {one.precision:9}  {one.size:5}  {loads:6}"
    print(label, end="  ", flush=True)
    try:
        call = _call(one, dtype, device)
        with cublas.only(False):
            by_triton = _microseconds(call)
        with cublas.only(True):
            by_cublas = _microseconds(call)
    except RuntimeError as error:  # out of memory is one
        print(f"not measured: {str(error).partition(chr(10))[0]}", flush=True)
        return None
    wins = by_cublas < MARGIN * by_triton
    print(f"{by_triton:10.1f}  {by_cublas:10.1f}  {'cuBLAS' if wins else 'Triton'}", flush=True)
    times = {"triton_us": round(by_triton, 2), "cublas_us": round(by_cublas, 2)}
    return {**asdict(one), **times, "cublas": wins}


def _microseconds(call: Callable[[], object]) -> float:
    return 1000 * float(do_bench(call, warmup=10, rep=50, return_mode="median"))


def _call(one: cublas.Class, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Products of random matrices: on zeros a GPU draws less power and is faster."""
    count, rows = max(1, ROWS // one.size), one.size + (not one.wide)
    tensors, states = (
        [torch.randn(rows, rows, device=device).to(d) for _ in range(number)]
        for d, number in ((dtype, count), (state_dtype(dtype), 2 * count))
    )
    for state in states:
        state.div_(math.sqrt(one.size))
    return lambda: mode_products(tensors, states)


def _save(rows: list[dict[str, Any]], device: torch.device, out: Path | None) -> None:
    valid_for = cublas.identity(device)
    assert valid_for is not None
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = {"date": date, "cuda": torch.version.cuda or torch.version.hip, "margin": MARGIN}
    text = json.dumps({**valid_for, **made, "classes": rows}, indent=1)
    for path in filter(None, (cublas.path_of(valid_for), out)):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes read the table at any time: they see all of it or none.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(path)
        print(f"wrote {path}", flush=True)
    cublas.chosen.cache_clear()
