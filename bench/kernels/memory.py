"""How much memory each method needs beyond parameters and gradients, in a process of its own.

``python -m bench.kernels.memory METHOD CASES`` prints for each case (a list of mode sizes for each
parameter; all cases together are one JSON list) the bytes of the method's state, by name, and the
peak of the process beyond what it held before: the state and whatever else was alive at once. The
peak is Linux's (``VmHWM``, set back before each case); elsewhere it is null.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.kernels.inputs import empty_like, generator, gram_statistics, normal
from tnt_kernels import gram_ema_, inverse_root, preconditioned_step_
from tnt_optim import TNT
from tools.measuring.parameter_sets import ParameterSet

Shapes = Sequence[Sequence[int]]
State = dict[str, list[Tensor]]
_ROOT = Path(__file__).resolve().parents[2]


def measure_in_subprocess(method: str, cases: Sequence[Shapes]) -> list[dict[str, Any]]:
    """Runs ``measure`` on every case in one new process.

    Returns:
        For each case "state": bytes by name, and "peak": bytes or None.
    """
    # Fixed thresholds: each large buffer is a mapping of its own, gone from the process once freed.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels.memory", method, json.dumps(cases)],
        cwd=_ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: list[dict[str, Any]] = json.loads(done.stdout)
    return measured


def measure(method: str, shapes: Shapes) -> dict[str, Any]:
    """Two steps of ``method`` on parameters with these modes, with everything due at both."""
    rng = generator()
    params = [nn.Parameter(tensor) for tensor in normal(shapes, rng)]
    for param, grad in zip(params, normal(shapes, rng), strict=True):
        param.grad = grad
    gc.collect()
    before = _reset_peak()
    state = METHODS[method](params)
    peak = None if before is None else _status("VmHWM") - before
    return {
        "state": {name: sum(t.nbytes for t in tensors) for name, tensors in state.items()},
        "peak": peak,
    }


def _tnt(params: list[nn.Parameter]) -> State:
    # stat_interval and inverse_interval 1: all temporaries of a step are seen.
    options: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 1, "fisher": "empirical"}
    group = {"params": params, "modes": tuple}  # every dimension is a mode
    optimizer = TNT([group], lr=1e-3, damping=0.1, **options)
    for _ in range(2):
        optimizer.step()
    states = list(optimizer.state_dict()["state"].values())
    return {
        "statistics": [stat for state in states for stat in state["stats"]],
        "inverses": [factor for state in states for factor in state["factors"]],
        "momenta": [state["momentum"] for state in states],
    }


def _shampoo(params: list[nn.Parameter]) -> State:
    """Shampoo's kernel work: statistics, roots, update."""
    views = ParameterSet("", tuple(tuple(p.shape) for p in params), each_dimension_a_mode=True)
    weights = [p.detach() for p in params]
    grads = [p.grad for p in params if p.grad is not None]
    momenta = [torch.zeros_like(weight) for weight in weights]
    stats = gram_statistics(views, generator())
    factors = empty_like(stats)
    roots = [2 * weight.dim() for weight in weights]
    for _ in range(2):
        gram_ema_(stats, grads, 0.9)
        inverse_root(stats, 0.1, roots, factors)
        preconditioned_step_(weights, momenta, grads, factors, 1e-3, 0.9, 0.0)
    return {
        "statistics": [s for row in stats for s in row],
        "inverses": [f for row in factors for f in row],
        "momenta": momenta,
    }


def _adam(params: list[nn.Parameter]) -> State:
    optimizer = torch.optim.AdamW(params, fused=True)
    for _ in range(2):
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    return {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}


def _newton(params: list[nn.Parameter]) -> State:
    """Storage only: one dense matrix over all entries of each parameter, as BFGS keeps it."""
    return {"matrix": [torch.full((p.numel(), p.numel()), 1.0) for p in params]}


METHODS: dict[str, Callable[[list[nn.Parameter]], State]] = {
    "tnt": _tnt,
    "shampoo": _shampoo,
    "adam": _adam,
    "newton": _newton,
}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_peak() -> int | None:
    """Sets the peak back to what the process holds now, and returns that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status("VmRSS")
    except OSError:
        return None


def main() -> None:
    """Measures what the command line names and prints it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.memory")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("cases", type=json.loads)
    arguments = parser.parse_args()
    # Libraries, thread pools and their buffers; a dense matrix over 256 x 256 would be 17 GB.
    measure(arguments.method, [(16, 16) if arguments.method == "newton" else (256, 256)])
    print(json.dumps([measure(arguments.method, shapes) for shapes in arguments.cases]))


if __name__ == "__main__":
    main()
