"""Lets the launchers of ``tnt_kernels.triton`` run on the machine, on CPU tensors."""

import functools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu.ptx import blackwell, instructions, matrices
from gpu.ptx.machine import CONTROL, Machine, Step
from gpu.ptx.memory import GlobalMemory
from gpu.ptx.program import Program, parse
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tnt_kernels.triton import launch
from tools.compile_report.launches import modules
from tools.compile_report.machine_code import no_device

assert blackwell and matrices  # register their instructions

# Lanes that are executed together: enough to make numpy's fixed costs small.
LANES = 4096


@functools.cache
def decoded(ptx: str) -> tuple[Program, list[Step | None]]:
    """A kernel and what executes each of its instructions; of control flow, the machine does."""
    program = parse(ptx)
    return program, [
        None if given.parts[0] in CONTROL else instructions.decode(given)
        for given in program.instructions
    ]


def run(
    ptx: str, memory: GlobalMemory, arguments: Sequence[int], grid: int, shared_bytes: int
) -> None:
    """Executes all programs of a launch."""
    program, steps = decoded(ptx)
    # Triton's own parameters are the last ones.
    values = [*arguments, *[0] * (len(program.parameters) - len(arguments))]
    count = max(1, LANES // program.threads)
    parts = [range(first, min(first + count, grid)) for first in range(0, grid, count)]
    random.shuffle(parts)
    with np.errstate(all="ignore"):
        for programs in parts:
            Machine(program, steps, memory, values, programs, shared_bytes).run()
    memory.check_programs()


def _bits(argument: Tensor | int | float) -> int:
    """What a kernel gets for an argument; a Python float is a float64 to our kernels."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return int(np.float64(argument).view(np.int64)) if isinstance(argument, float) else argument


def _weakly(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Gives the tensor as long as somebody else holds its memory."""
    if tensor.is_inference():  # its views do not say so
        return lambda: tensor
    if tensor._base is None:
        return weakref.ref(tensor)
    base = weakref.ref(tensor._base)
    shape, dtype = (tensor.shape, tensor.stride(), tensor.storage_offset()), tensor.dtype

    def again() -> Tensor | None:
        held = base()
        if held is None:
            return None
        # Nothing that takes memory: tests count who does.
        return (held if held.dtype == dtype else held.view(dtype)).as_strided(*shape)

    return again


@contextmanager
def on_machine(capability: int) -> Iterator[None]:
    """Within it, every launch is compiled for an architecture, as 80, and executed here.

    Kernels may use the tensors whose addresses the launchers put into tables, and those that are
    arguments.
    """
    compile_, send = JITFunction.run, launch.addresses_of
    # By the address of a table, what it lists: tensors that nobody holds any more are freed.
    listed: dict[int, list[Callable[[], Tensor | None]]] = {}

    def addresses_of(*groups: Sequence[Tensor]) -> Tensor:
        table = send(*groups)
        listed[table.data_ptr()] = [_weakly(tensor) for group in groups for tensor in group]
        return table

    class Compiled:
        """A compiled kernel; ``compiled[grid](*arguments)`` executes it."""

        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            x, _, _ = grid  # Triton pads no grid here
            return functools.partial(self._start, x)

        def _start(self, programs: int, *arguments: Any) -> None:
            assert len(arguments) == len(self._kernel.src.fn.arg_names)
            arguments = tuple(a for a in arguments if a is not None)  # the constants' places
            given = [a for a in arguments if isinstance(a, Tensor)]
            found = [again() for a in given for again in listed.get(a.data_ptr(), ())]
            reached = [tensor for tensor in found if tensor is not None]
            values = [_bits(a) for a in arguments]
            memory = GlobalMemory([*given, *reached])
            run(self._kernel.asm["ptx"], memory, values, programs, self._kernel.metadata.shared)

    def start(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Compiled:
        driver.set_active(no_device(capability))
        compiled = Compiled(compile_(self, *arguments, grid=grid, warmup=True, **named))
        places = [None] * (len(self.arg_names) - len(arguments))
        compiled[grid[0], 1, 1](*arguments, *places)
        return compiled

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", start))
        patches.enter_context(mock.patch.object(launch, "_compiled", {}))
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
        yield
