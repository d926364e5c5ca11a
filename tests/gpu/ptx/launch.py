"""Lets the launchers of ``tnt_kernels.triton`` run on the machine, on CPU tensors."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu.ptx import arithmetic, blackwell, matrices
from gpu.ptx.machine import Machine, Step
from gpu.ptx.memory import GlobalMemory
from gpu.ptx.program import Program, parse
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tnt_kernels.triton import launch
from tools.compile_report.launches import modules

assert blackwell and matrices  # register their instructions

# Lanes that are executed together: enough to make numpy's fixed costs small.
LANES = 4096


@dataclass
class Launches:
    """What ran: kernels, and instructions of each program."""

    kernels: set[str] = field(default_factory=set)
    instructions: int = 0


_decoded: dict[str, tuple[Program, list[Step]]] = {}


def decoded(ptx: str) -> tuple[Program, list[Step]]:
    """A kernel and what executes each of its instructions."""
    if ptx not in _decoded:
        program = parse(ptx)
        _decoded[ptx] = (
            program,
            [
                _no_step
                if given.parts[0] in ("bra", "ret", "exit", "bar", "barrier")
                else arithmetic.decode(given)
                for given in program.instructions
            ],
        )
    return _decoded[ptx]


def _no_step(machine: Machine, lanes: Any) -> None:
    raise AssertionError("control flow is the machine's")


def run(
    ptx: str, memory: GlobalMemory, arguments: Sequence[int], grid: int, shared_bytes: int
) -> int:
    """Executes all programs of a launch; returns the number of instructions executed."""
    program, steps = decoded(ptx)
    values = [
        *arguments,
        *[0] * (len(program.parameters) - len(arguments)),
    ]  # Triton's own are last
    count = max(1, LANES // program.threads)
    parts = [range(first, min(first + count, grid)) for first in range(0, grid, count)]
    random.shuffle(parts)
    executed = 0
    with np.errstate(all="ignore"):
        for programs in parts:
            machine = Machine(program, steps, memory, values, programs, grid, shared_bytes)
            machine.run()
            executed += machine.executed
    memory.check_programs()
    return executed


@contextmanager
def on_machine(capability: int) -> Iterator[Launches]:
    """Within it, every launch is compiled for an architecture, as 80, and executed here.

    Kernels may use the tensors whose addresses the launchers put into tables, and those that are
    arguments.
    """
    done, compile_, send = Launches(), JITFunction.run, launch.addresses_of
    listed: dict[int, Sequence[Tensor]] = {}  # by the address of a table, what it lists

    def addresses_of(tensors: Sequence[Tensor]) -> Tensor:
        table = send(tensors)
        listed[table.data_ptr()] = list(tensors)
        return table

    def start(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        driver.set_active(no_device(capability))
        compiled = compile_(self, *arguments, grid=grid, warmup=True, **named)
        given = [a for a in arguments if isinstance(a, Tensor)]
        reached = [tensor for a in given for tensor in listed.get(a.data_ptr(), ())]
        values = [a.data_ptr() if isinstance(a, Tensor) else int(a) for a in arguments]
        memory = GlobalMemory([*given, *reached])
        done.kernels.add(self.fn.__name__)
        done.instructions += run(
            compiled.asm["ptx"], memory, values, grid[0], compiled.metadata.shared
        )
        return compiled

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", start))
        for module in modules():
            for name, instead in (
                ("addresses_of", addresses_of),
                ("has_tensor_cores", lambda device: True),
            ):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, instead))
        # New memory is full of NaN.
        patches.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        torch.use_deterministic_algorithms(True)
        yield done


def no_device(capability: int) -> Any:
    """A driver of a device that is not there, for which Triton compiles."""
    return SimpleNamespace(
        get_current_device=lambda: capability,  # Triton caches compiled kernels by it
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, warp_size=32),
    )
