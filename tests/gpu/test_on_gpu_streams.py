"""A training loop on a GPU: no synchronisation, streams, graphs, dispatch, optimizers.

Skipped without a CUDA device; TNT_TEST_DEVICE=cpu runs some on the CPU (see device_calls.py).
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import SHAPES, close, flat, identical, normal
from device_calls import (
    CUT_TERM,
    DEVICE,
    MANY,
    check,
    cuda_only,
    no_waiting,
    on_device,
    usual_settings,
)
from operators import NUMBERS, ROOTED, VARIANTS, Call, agree, call, everything, flat_arguments
from tolerances import FLOAT32_OPERATOR, NEWTON_OPERATOR
from torch import Tensor, nn

import tnt_kernels
from tnt_kernels import reference
from tnt_optim import KFAC, TNT

pytestmark = on_device

usual = pytest.fixture(autouse=True)(usual_settings)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def may_wait(variant: str) -> bool:
    """Whether the reference serves, which may synchronise."""
    return tnt_kernels.backends().ops[variant.split()[0]]["cuda"] == "reference"


def numbers_as_tensors(given: Call, factor: float = 1.0) -> Call:
    numbers = NUMBERS[given.name].items()
    scaled = {k: torch.tensor(factor * n, dtype=torch.float64) for k, n in numbers}
    return given.with_arguments(**scaled)


def tensors_of(given: Call) -> list[Tensor]:
    return flat(list(given.arguments.values()))


def warmed_up(given: Call) -> Call:
    """On the device, called twice: compiled, planned, tables sent."""
    there = given.copy(DEVICE)
    for _ in range(2):
        there()
    return there


@cuda_only
@every_variant
def test_does_not_wait_for_the_device(variant: str) -> None:
    if may_wait(variant):
        pytest.skip("the reference serves")
    there = warmed_up(call(variant, SHAPES))
    with no_waiting():
        there()


@cuda_only
@every_variant
@pytest.mark.parametrize("shapes", [SHAPES, MANY], ids=["small", "partial sums"])
def test_graph(variant: str, shapes: Sequence[Sequence[int]]) -> None:
    """Captured once; replayed on other inputs and other device scalars, twice."""
    if may_wait(variant):
        pytest.skip("the reference serves")
    given = numbers_as_tensors(call(variant, shapes))
    there = given.copy(DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            there()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = there()
    for change in (0.5, 0.25):
        other = numbers_as_tensors(call(variant, shapes), change)
        wanted = other.double()(reference)
        for static, fresh in zip(tensors_of(there), tensors_of(other), strict=True):
            static.copy_(fresh)
        # Eager calls of the same layouts and other addresses must leave the graph's tables alone.
        elsewhere = [given.copy(DEVICE) for _ in range(3)]
        for eager in elsewhere:
            eager()
        graph.replay()
        torch.cuda.synchronize()
        newton = NEWTON_OPERATOR if variant in ROOTED else 0.0
        agree(results, wanted, there, max(newton, FLOAT32_OPERATOR) + 1000 * CUT_TERM)


@cuda_only
@every_variant
def test_on_another_stream(variant: str) -> None:
    """Its inputs arrive there late: on any other stream the call would read NaN."""
    given = call(variant, SHAPES)
    wanted = given.double()(reference)
    there, real = warmed_up(given), given.copy(DEVICE)
    for tensor in tensors_of(there):
        tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # clock cycles: some 30 ms
        for tensor, value in zip(tensors_of(there), tensors_of(real), strict=True):
            tensor.copy_(value, non_blocking=True)
        results = there()
    side.synchronize()
    agree(results, wanted, there)


@cuda_only
@every_variant
def test_on_the_second_gpu(variant: str) -> None:
    """While the first is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    second = torch.device("cuda", 1)
    for device in (second, torch.device("cuda", 0), second):
        check(call(variant, SHAPES), device=device)
    assert torch.cuda.current_device() == 0


@cuda_only
@every_variant
def test_another_device_is_refused(variant: str) -> None:
    there = call(variant, [(9, 5)]).copy(DEVICE)
    other = there.lists[1]
    mixed = there.map(lambda key, tensor: tensor.cpu() if key == other else tensor)
    with pytest.raises(ValueError, match="cpu"):
        mixed()


# Dispatch.


@every_variant
def test_opcheck(variant: str) -> None:
    given = call(variant, [(9, 5), (7,), (5, 9, 3)]).map(
        lambda key, tensor: torch.rand_like(tensor) if key == "out" else tensor
    )
    operator = getattr(torch.ops.tnt_kernels, given.name).default
    torch.library.opcheck(operator, flat_arguments(given.copy(DEVICE)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(
    ("variant", "backend"),
    [*((v, "aot_eager") for v in VARIANTS), pytest.param("gram_ema_", "inductor", marks=cuda_only)],
)
def test_compiles(variant: str, backend: str) -> None:
    """In one graph, to the bit."""
    torch.compiler.reset()
    given = call(variant, [(9, 5), (7,), (5, 9, 3)])
    public = getattr(tnt_kernels, given.name)
    compiled = torch.compile(public, fullgraph=True, backend=backend)
    there = given.copy(DEVICE)
    results = there(SimpleNamespace(**{given.name: compiled}))
    identical(everything(results), everything(given.copy(DEVICE)()))


# The optimizer.


def trained(start: list[Tensor], grads: list[list[Tensor]], **settings: Any) -> list[Tensor]:
    """Where steps with these gradients take parameters from the start, in float64 on the CPU."""
    params = [nn.Parameter(p.clone()) for p in start]
    settings |= {"lr": 0.01, "damping": 1.0, "likelihood": None, "stat_interval": 2}
    optimizer = TNT.paper(params, **settings)
    for row in grads:
        for p, grad in zip(params, row, strict=True):
            p.grad = grad.to(p, copy=True)
        optimizer.step()
    return [p.detach().cpu().double() for p in params]


@pytest.mark.parametrize("graft", [None, "adam"])
def test_optimizer(graft: str | None) -> None:
    """Some steps on the device against the same in float64 on the CPU, relative to their length."""
    start = [normal(shape) for shape in ((20, 30), (20,), (8, 3, 3, 3))]
    grads = [[normal(p.shape) for p in start] for _ in range(6)]

    def moved(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        there = [p.to(device, dtype) for p in start]
        ends = trained(there, grads, inverse_interval=3, graft=graft)
        return [end - p for end, p in zip(ends, start, strict=True)]

    wanted = moved(torch.device("cpu"), torch.float64)
    for actual, value in zip(moved(DEVICE, torch.float32), wanted, strict=True):
        close(actual, value, 1e-3)


@cuda_only
@pytest.mark.parametrize("index", [0, 1])
def test_recorded_steps(index: int) -> None:
    """As CUDA graphs, on a GPU that need not be the current one."""
    if torch.cuda.device_count() <= index or may_wait("damped_inverse"):
        pytest.skip("one GPU" if index else "the reference serves")
    device = torch.device("cuda", index)
    start = [normal(shape).to(device) for shape in ((20, 30), (20,), (8, 3, 3, 3))]
    grads = [[torch.randn_like(p) for p in start] for _ in range(24)]
    recorded, plain = (
        trained(start, grads, inverse_interval=6, capturable=capturable)
        for capturable in (True, False)
    )
    for actual, wanted in zip(recorded, plain, strict=True):
        close(actual, wanted, 1e-5)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_kfac(inverse: str) -> None:
    """The same with observations, micro-batches and a convolution."""
    start = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 20))
    batches = [normal((2, 16, 2, 5, 5)) for _ in range(6)]
    weights = normal((16, 20))

    def moved(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        model = copy.deepcopy(start).to(device, dtype)
        sampled = weights.to(device, dtype)
        optimizer = KFAC.paper(
            model,
            lr=0.01,
            damping=1.0,
            likelihood=lambda output: (output * sampled).sum() / 16,
            inverse=inverse,
            stat_interval=2,
            inverse_interval=3,
            weight_decay=0.1,
        )
        for batch in batches:
            optimizer.zero_grad()
            for x in batch:
                output = model(x.to(device, dtype))
                optimizer.observe(output)
                output.square().mean().backward()
            optimizer.step()
        ends = zip(model.parameters(), start.parameters(), strict=True)
        return [(p.cpu().double() - s.double()).detach() for p, s in ends]

    wanted = moved(torch.device("cpu"), torch.float64)
    for actual, value in zip(moved(DEVICE, torch.float32), wanted, strict=True):
        close(actual, value, 1e-3)


@cuda_only
@pytest.mark.parametrize("method", ["tnt", "tnt-ef", "kfac"])
def test_step_does_not_wait_for_the_device(method: str) -> None:
    """Nor does an observation, with two micro-batches a step. The first four steps may wait."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)).to(DEVICE)
    settings: dict[str, Any] = {"stat_interval": 1, "inverse_interval": 2}
    settings["likelihood"] = None if method == "tnt-ef" else "categorical"
    kfac = method == "kfac"
    optimizer = KFAC(model, **settings) if kfac else TNT.paper(model.parameters(), **settings)
    x, labels = torch.randn(2, 16, 20, device=DEVICE), torch.arange(16, device=DEVICE) % 10
    for number in range(6):
        with no_waiting() if number >= 4 else nullcontext():
            for half in x:
                output = model(half)
                optimizer.observe(output)
                (nn.functional.cross_entropy(output, labels) / 2).backward()
            optimizer.step()
