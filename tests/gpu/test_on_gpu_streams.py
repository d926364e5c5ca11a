"""What a training loop on a GPU relies on: no waiting, streams, graphs, dispatch, the optimizer.

Skipped where there is no CUDA device, but with TNT_TEST_DEVICE=cpu (see device_calls.py).
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from cases import SHAPES, close, flat, identical, normal
from device_calls import (
    CUT_TERM,
    DEVICE,
    MANY,
    Call,
    agree,
    call,
    check,
    cuda_only,
    every_operator,
    mapped,
    on_device,
    usual,
    usual_settings,
)
from torch import Tensor, nn

import tnt_kernels
from tnt_kernels import reference
from tnt_optim import KFAC, TNT

pytestmark = on_device


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield from usual_settings()


# What a training loop may rely on: no waiting, streams, graphs.


def served_by_reference(name: str) -> bool:
    return tnt_kernels.backends().ops[name]["cuda"] == "reference"


def warmed_up(given: Call) -> Call:
    """On the device, called before: compiled, planned, tables sent."""
    there = given.on(DEVICE)
    for _ in range(2):
        there()
    return there


@cuda_only
@every_operator
def test_does_not_wait_for_the_device(name: str) -> None:
    if served_by_reference(name):
        pytest.skip("the reference serves, which may wait")
    there = warmed_up(call(name, SHAPES, "mixed"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there()
    finally:
        torch.cuda.set_sync_debug_mode("default")


NUMBERS = {
    "gram_ema_": (2,),
    "damped_inverse": (1,),
    "inverse_root": (1,),
    "mode_products": (),
    "preconditioned_step_": (4, 5, 6),
    "grafted_directions_": (3,),
}


@cuda_only
@every_operator
@pytest.mark.parametrize("shapes", [SHAPES, MANY], ids=["small", "partial sums"])
def test_graph(name: str, shapes: Sequence[Sequence[int]]) -> None:
    """Captured once; replayed on other inputs and other device scalars, twice."""
    if served_by_reference(name):
        pytest.skip("the reference serves, which may wait")
    given = call(name, shapes, "mixed")
    for i in NUMBERS[name]:
        given.arguments[i] = torch.tensor(given.arguments[i], dtype=torch.float64)
    there = given.on(DEVICE)
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
        other = call(name, shapes, "mixed")
        for i in NUMBERS[name]:
            other.arguments[i] = torch.tensor(change * other.arguments[i], dtype=torch.float64)
        wanted = other.in_float64()(reference)
        for static, fresh in zip(flat(there.arguments), flat(other.arguments), strict=True):
            static.copy_(fresh)
        # Eager calls of the same layouts and other addresses must leave the graph's tables alone.
        elsewhere = [given.on(DEVICE) for _ in range(3)]
        for eager in elsewhere:
            eager()
        graph.replay()
        torch.cuda.synchronize()
        agree(results, wanted, there, usual(name, torch.float32) + 1000 * CUT_TERM)


@cuda_only
@every_operator
def test_on_another_stream(name: str) -> None:
    """Its inputs are made there, late: on any other stream it would read poison."""
    given = call(name, SHAPES, "mixed")
    wanted = given.in_float64()(reference)
    there = warmed_up(given)
    real = given.on(DEVICE)
    for tensor in flat(there.arguments):
        tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # clock cycles: some 30 ms
        for tensor, value in zip(flat(there.arguments), flat(real.arguments), strict=True):
            tensor.copy_(value, non_blocking=True)
        results = there()
    side.synchronize()
    agree(results, wanted, there)


@cuda_only
@every_operator
def test_on_the_second_gpu(name: str) -> None:
    """While the first is the present one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    second = torch.device("cuda", 1)
    for device in (second, torch.device("cuda", 0), second):
        check(call(name, SHAPES, "mixed"), device=device)
    assert torch.cuda.current_device() == 0


@cuda_only
@every_operator
def test_another_device_is_refused(name: str) -> None:
    there = call(name, [(9, 5)]).on(DEVICE)
    lists = [i for i, a in enumerate(there.arguments) if isinstance(a, list)]
    there.arguments[lists[1]] = mapped(there.arguments[lists[1]], Tensor.cpu)
    with pytest.raises(ValueError, match="cpu"):
        there()


@every_operator
def test_scalars_on_the_device(name: str) -> None:
    """0-dim tensors there are as good as numbers, to the bit for what numbers become."""
    given = call(name, SHAPES, "mixed")
    scalars = copy.copy(given.arguments)
    for i in NUMBERS[name]:
        scalars[i] = torch.tensor(scalars[i], dtype=torch.float64)
    numbers = given.on(DEVICE)()
    for actual, wanted in zip(Call(name, scalars).on(DEVICE)(), numbers, strict=True):
        identical(actual, wanted)


# Dispatch.


def flat_call(given: Call) -> tuple[object, ...]:
    """What torch.ops.tnt_kernels takes."""

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    a = given.arguments
    if given.name == "gram_ema_":
        return flat(a[0]), a[1], number(a[2])
    if given.name == "damped_inverse":
        return flat(a[2]), flat(a[0]), [len(row) for row in a[0]], number(a[1]), a[3]
    if given.name == "inverse_root":
        return flat(a[3]), flat(a[0]), [len(r) for r in a[0]], number(a[1]), [a[2]] * len(a[0])
    if given.name == "mode_products":
        return a[0], flat(a[1])
    if given.name == "grafted_directions_":
        momenta, grads, factors, momentum, second_moments, counts, out = a
        lists = momenta, second_moments, out, grads, flat(factors)
        return *lists, number(momentum), counts, 0.99, 1e-8
    return *a[:3], flat(a[3]), *map(number, a[4:])


@every_operator
def test_opcheck(name: str) -> None:
    given = call(name, [(9, 5), (7,), (5, 9, 3)], "mixed").on(DEVICE)
    torch.library.opcheck(getattr(torch.ops.tnt_kernels, name).default, flat_call(given))


@every_operator
def test_compiles(name: str) -> None:
    compiled_equals_eager(name, "aot_eager")


@cuda_only
def test_compiles_by_default() -> None:
    compiled_equals_eager("gram_ema_", "inductor")


def compiled_equals_eager(name: str, backend: str) -> None:
    """In one graph, to the bit."""
    torch._dynamo.reset()
    given = call(name, [(9, 5), (7,), (5, 9, 3)], "mixed")
    there = given.on(DEVICE)
    compiled = torch.compile(getattr(tnt_kernels, name), fullgraph=True, backend=backend)
    returned = compiled(*there.arguments)
    for actual, wanted in zip(there.results(returned), given.on(DEVICE)(), strict=True):
        identical(actual, wanted)


# The optimizer.


@pytest.mark.parametrize("graft", [None, "adam"])
def test_optimizer(graft: str | None) -> None:
    """Some steps there against the same in float64 here, relative to how far they go."""
    start = [normal(shape) for shape in ((20, 30), (20,), (8, 3, 3, 3))]
    grads = [[normal(p.shape) for p in start] for _ in range(6)]

    def moved(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        params = [nn.Parameter(p.to(device, dtype, copy=True)) for p in start]
        optimizer = TNT(
            params,
            lr=0.01,
            damping=1.0,
            fisher="empirical",
            stat_interval=2,
            inverse_interval=3,
            graft=graft,
        )
        for row in grads:
            for p, grad in zip(params, row, strict=True):
                p.grad = grad.to(device, dtype)
            optimizer.step()
        return [p.detach().cpu().double() - s for p, s in zip(params, start, strict=True)]

    wanted = moved(torch.device("cpu"), torch.float64)
    for actual, value in zip(moved(DEVICE, torch.float32), wanted, strict=True):
        close(actual, value, 1e-3)


@pytest.mark.parametrize("inverse", ["damped", "eigenbasis"])
def test_kfac(inverse: str) -> None:
    """As above, with what is observed, micro-batches and a layer that runs as a convolution."""
    start = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 20))
    batches = [normal((2, 16, 2, 5, 5)) for _ in range(6)]
    weights = normal((16, 20))

    def moved(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        model = copy.deepcopy(start).to(device, dtype)
        sampled = weights.to(device, dtype)
        optimizer = KFAC(
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


def stepped_without_waiting(step: Callable[[], None]) -> None:
    """Four steps, which may wait, then two that may not."""
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda_only
def test_step_does_not_wait_for_the_device() -> None:
    params = [nn.Parameter(normal(shape).to(DEVICE)) for shape in ((20, 30), (20,))]
    optimizer = TNT(params, lr=0.01, fisher="empirical", stat_interval=1, inverse_interval=2)
    for p in params:
        p.grad = torch.randn_like(p)
    stepped_without_waiting(optimizer.step)


@cuda_only
@pytest.mark.parametrize("method", ["tnt", "kfac"])
def test_observed_step_does_not_wait_for_the_device(method: str) -> None:
    """Nor does what chooses between the observations of two micro-batches."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)).to(DEVICE)
    intervals = {"stat_interval": 1, "inverse_interval": 2}
    optimizer: TNT | KFAC
    optimizer = (
        TNT(model.parameters(), **intervals) if method == "tnt" else KFAC(model, **intervals)
    )
    x = torch.randn(2, 16, 20, device=DEVICE)

    def step() -> None:
        for half in x:
            output = model(half)
            optimizer.observe(output)
            output.square().mean().backward()
        optimizer.step()

    stepped_without_waiting(step)
