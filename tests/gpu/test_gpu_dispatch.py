"""Which implementation serves on a GPU: Triton, or the reference with a warning that says why."""

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import GPU, close, identical, normal, scalar
from operators import call, flat_arguments
from recorded_graph import Recording
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tnt_kernels
from tnt_kernels import calls, reference, triton
from tnt_kernels.__main__ import main

# The module, which the function of its name hides.
backends = importlib.import_module("tnt_kernels.backends")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cached_kernels() -> Iterator[None]:
    """Which kernel serves is cached, and a missing one is warned of once."""
    backends._kernel.cache_clear()
    yield
    backends._kernel.cache_clear()


@pytest.mark.parametrize("good", ["3.6.0", "3.7.1", "3.10.0+git1", "4.0", "unknown"])
def test_good_versions(monkeypatch: pytest.MonkeyPatch, good: str) -> None:
    monkeypatch.setattr(triton, "version", lambda: good)
    assert triton.missing() is None
    assert {row["cuda"] for row in tnt_kernels.backends().ops.values()} == {"Triton"}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("none", "not installed"),
        ("3.5.1", "3.5.1 is too old, 3.6"),
        ("2.9.0", "2.9.0 is too old, 3.6"),
    ],
)
def test_bad_versions_are_named(monkeypatch: pytest.MonkeyPatch, bad: str, why: str) -> None:
    monkeypatch.setattr(triton, "version", lambda: bad)
    assert why in (triton.missing() or "")
    assert {row["cuda"] for row in tnt_kernels.backends().ops.values()} == {"reference"}


def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    for capability, fits in (((6, 1), False), ((7, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        why = triton.missing(torch.device("cuda", 0))
        assert (why is None) == fits
        assert fits or (why is not None and "an old one has compute capability 6.1, 7.0" in why)


def served() -> tuple[list[Tensor], list[Tensor]]:
    """The function that calls on a GPU are dispatched to; its products and the reference's."""
    given = call("mode_products", [(9, 5), (3,)]).copy(GPU)
    products = backends._serve("mode_products", *flat_arguments(given))
    return products, reference.mode_products(**given.arguments)


def test_triton_serves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        products, wanted = served()
    for product, expected in zip(products, wanted, strict=True):
        close(product, expected)
    kernel = backends._kernel("mode_products", products[0].device)
    assert kernel.__module__ == "tnt_kernels.triton.mode_products"
    assert all(backends._kernel(name, GPU).__name__ == name for name in backends.OPERATORS)


@pytest.mark.usefixtures("by_cublas")
def test_autocast_does_not_round_products() -> None:
    """cuBLAS is called through PyTorch's products."""
    given = call("mode_products", [(256, 256)], "full").copy(GPU)
    products = backends._serve("mode_products", *flat_arguments(given))
    with torch.autocast(GPU.type, torch.bfloat16):
        identical(backends._serve("mode_products", *flat_arguments(given)), products)


def test_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "version", lambda: "none")
    with pytest.warns(RuntimeWarning, match="^tnt_kernels.mode_products runs on its ref.* Triton "):
        products, wanted = served()
    identical(products, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served()


def test_the_device_is_that_of_the_lists() -> None:
    there = torch.ones(2, device="meta")
    assert backends._device(([there], [], scalar(1.0))) == there.device
    assert backends._device(([], [], scalar(1.0))) == CPU


def test_the_page_warns_where_a_gpu_has_no_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([])
    assert torch.cuda.is_available() or capsys.readouterr().err == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a GPU")
    monkeypatch.setattr(triton, "version", lambda: "none")
    capsys.readouterr()
    main([])
    said = capsys.readouterr()
    why = "all operators use the reference: Triton is not installed"
    assert said.err == f"\nwarning: on the GPU {why}\n"
    assert said.out == f"{tnt_kernels.backends()}\n"


class Gpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Gpu)


class Calls:
    """Calls on tensors that say they are on a GPU; how many were checked and by which way went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct = self.dispatched = self.checks = 0
        for name in ("_checked", "_apart"):
            monkeypatch.setattr(calls, name, set())
        monkeypatch.setattr(calls, "gpu", dict.fromkeys(("f", "g"), self._direct))
        monkeypatch.setattr(calls, "_op", lambda name: self._dispatched)

    def __call__(self, *given: object, name: str = "f", written: int = 1) -> int:
        before = self.checks
        calls._on_gpu(name, list(given), written, self._check)
        return self.checks - before

    def _check(self) -> None:
        self.checks += 1

    def _direct(self, *_: object) -> None:
        self.direct += 1

    def _dispatched(self, *_: object) -> None:
        self.dispatched += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_calls_are_recognised_by_all_that_is_checked(made: Calls) -> None:
    """Checked calls are recognised by shape, strides, dtype, orders and options."""
    memory = torch.zeros(64)
    base: list[object] = [[gpu(memory[:16].view(4, 4))], [2], scalar(1.0), False]
    assert made(*base) == 1 and made(*base) == 0
    assert made([gpu(memory[16:32].view(4, 4))], *base[1:]) == 0  # elsewhere
    assert made(*base, name="g") == 1
    for other in (
        memory[:16].view(4, 4).t(),
        memory[:16].view(2, 8),
        memory.double()[:16].view(4, 4),
    ):
        assert made([gpu(other)], *base[1:]) == 1
    for orders in ([3], []):
        assert made(base[0], orders, *base[2:]) == 1
    assert made(*base[:2], scalar(1.0, torch.float32), False) == 1
    assert made(*base[:3], True) == 1
    assert made.dispatched == 0 and made.direct == 11


def test_memory_that_may_be_shared_is_checked(made: Calls) -> None:
    """Until a call with these addresses has passed."""
    memory = torch.zeros(64)
    a, b, both = (gpu(memory[s].view(4, 4)) for s in (slice(16), slice(16, 32), slice(8, 24)))
    assert made([a], [b]) == 1 and made([b], [a]) == 0
    assert made([a], [both]) == 1 and made([a], [both]) == 0
    assert made([both], [a]) == 1
    assert made([a], [a], written=0) == 0


def test_few_keys_are_kept(made: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_KEYS", 4)
    for n in range(1, 20):
        assert made([gpu(torch.zeros(n))]) == 1
        assert len(calls._checked) <= 4 and len(calls._apart) <= 4


class Watching(TorchFunctionMode):
    """A mode that sees what PyTorch's functions are called with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_dispatcher_is_called_where_it_is_needed(made: Calls) -> None:
    tensor = gpu(normal((2, 2)))
    made([tensor])
    assert (made.direct, made.dispatched) == (1, 0)
    negated = [gpu(torch._neg_view(normal((2, 2))))]
    assert made(negated) == made(negated) == 1  # checked every time
    with torch.profiler.profile():
        made([tensor])
    with Recording(lambda name: False):
        made([tensor])
    with Watching():
        made([tensor])
    made([tensor], torch._neg_view(scalar(1.0)))
    assert (made.direct, made.dispatched) == (1, 6)


def test_a_sparse_table_is_checked(made: Calls) -> None:
    """The key of a table has its layout."""
    tensor, table = gpu(normal((2, 2))), torch.ones(3)
    assert made([tensor], table) == 1 and made([tensor], table) == 0
    assert made([tensor], table.to_sparse()) == 1


def test_other_calls_are_always_checked(made: Calls) -> None:
    for row in ([normal((2, 2))], [normal((2, 2)).to("meta")], [None], [gpu(normal((2,))), 3]):
        for _ in range(2):
            assert made(row, scalar(1.0)) == 1
    assert made.direct == 0
