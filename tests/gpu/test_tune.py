"""Large matrices by cuBLAS: the choice, the table and its program, and the results.

Without a GPU timings are made up, and PyTorch's products on the CPU stand for cuBLAS.
"""

import json
import runpy
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import triton_operators
from cases import GPU, close, normal
from contract import EveryOperator, Gram, Shape, Steps
from operators import agree, call

from tnt_kernels import reference
from tnt_kernels.triton import chain, cublas, launch, tune
from tnt_kernels.triton.cublas import Class, class_of

CPU = torch.device("cpu")
HERE = {"gpu": "NVIDIA Made Up/2", "torch": "2.0", "triton": "3.6"}
F32 = torch.float32
# Matrices of the smallest class and one that is too small; a vector.
SHAPES = [(256, 384), (27, 300), (512, 256), (65,)]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of the table, in a folder that does not exist; the CPU is said to be a GPU."""
    monkeypatch.setenv("TNT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cublas, "identity", lambda device: HERE)
    monkeypatch.setattr(launch, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(launch, "_plans", {})
    cublas.chosen.cache_clear()
    yield tmp_path / "cache" / "gpu-NVIDIA-Made-Up-2_torch-2.0_triton-3.6.json"
    cublas.chosen.cache_clear()


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The timer gives these in turn, and raises those that are errors; then 10 microseconds."""
    made_up: list[Any] = []

    def microseconds(measured: Callable[[], object]) -> float:
        time = made_up.pop(0) if made_up else 10.0
        if isinstance(time, BaseException):
            raise time
        return float(time)

    monkeypatch.setattr(tune, "_microseconds", microseconds)
    monkeypatch.setattr(tune, "SIZES", (256, 512))
    monkeypatch.setattr(tune, "ROWS", 1)
    return made_up


def by_cublas(shape: Sequence[int], precision: str = "tf32x3") -> bool:
    """Whether cuBLAS multiplies a float32 matrix by its factors."""
    return cublas.choose(CPU, precision, launch.layouts([torch.zeros(*shape)])[0])


# The choice.


@pytest.mark.parametrize(
    ("shape", "size", "wide"),
    [
        ((256, 256), 256, True),
        ((360, 360), 256, True),
        ((368, 368), 512, True),
        ((256, 4096), 1024, True),
        ((625, 2000), 1024, False),
        ((2000, 625), 1024, False),
        ((8192, 8192), 8192, True),
        ((50000, 4096), 8192, True),
    ],
)
def test_classes(shape: Shape, size: int, wide: bool) -> None:
    assert class_of(F32, "tf32", shape) == Class("float32", "tf32", size, wide)
    assert not class_of(torch.float16, "tf32", (260, 260)).wide  # 520 bytes


def test_only_large_matrices_that_need_no_copy_are_eligible() -> None:
    base = torch.zeros(600, 600)
    good = [base, base[:256, 3:300], base.mT, base.bfloat16(), base.half()]
    bad = [
        *(base[:255], base[:, :255], base[::, ::2], base[:1].expand(600, 600), base.double()),
        *(base.view(600, 30, 20), base.view(-1)),
    ]
    with cublas.only(True):
        for tensors, serves in ((good, True), (bad, False)):
            for layout in launch.layouts(tensors):
                assert cublas.choose(CPU, "tf32", layout) == serves


def test_one_mode_must_be_full() -> None:
    """The other may be diagonal; the parameters of a step may have any layout and dtype."""
    buffer = torch.zeros(256, 600)
    results = [buffer[:, :300], buffer[:, ::2].bfloat16(), buffer[:, :300], buffer[:, :300]]
    full, diagonal = ([torch.zeros(d, d) for d in (256, 300)], [torch.zeros(d) for d in (256, 300)])
    factors = [*full, full[0], diagonal[1], diagonal[0], full[1], *diagonal]
    groups = [torch.zeros(256, 300)] * 4, results, factors
    with cublas.only(True):
        plan = chain.plan(*map(launch.layouts, groups), CPU, 4, "tf32x3")
        assert plan.by_cublas == {0: 0, 1: 2, 2: 4}


def test_without_a_table_a_rule_decides(cache: Path) -> None:
    """cuBLAS serves large matrices in TF32, and those that Triton reads in narrow loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cublas.chosen(CPU) == cublas.RULE
    assert not (by_cublas((4096, 4096)) or by_cublas((1024, 1024), "tf32"))
    assert by_cublas((2048, 2048), "tf32") and by_cublas((2000, 625))
    assert not by_cublas((625, 300))


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TNT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    assert cublas.path_of(HERE).parent == Path("/home/user/.cache/tnt_kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cublas.path_of(HERE).parent == Path("/xdg/tnt_kernels")
    monkeypatch.setenv("TNT_CACHE", "/own")
    assert cublas.path_of(HERE).parent == Path("/own")


# The program.


def test_timings_are_written_read_and_obeyed(
    cache: Path, timings: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Size 256: in full precision, then in TF32. 95 is not below 0.95 of 100. Then in narrow loads.
    timings += [100.0, 94.0, 100.0, 95.0, 100.0, 300.0, 100.0, 2.0]
    before = torch.backends.cuda.matmul.fp32_precision
    assert tune.tune(CPU, tmp_path / "copies" / "tune.json")
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert cublas.chosen(CPU) == {
        Class("float32", "tf32x3", 256),
        Class("float32", "tf32", 256, wide=False),
    }
    assert by_cublas((256, 300)) and not by_cublas((256, 300), "tf32")
    assert not (by_cublas((512, 512)) or by_cublas((2048, 2048), "tf32"))
    table = json.loads(cache.read_text())
    assert {key: table[key] for key in HERE} == HERE and table["date"]
    # Two sizes in two precisions: float32 in wide and narrow loads, half precision in wide ones.
    assert len(table["classes"]) == 2 * 2 * (2 + 2)
    first = {"dtype": "float32", "precision": "tf32x3", "size": 256}
    times = {"triton_us": 100.0, "cublas_us": 94.0}
    assert table["classes"][0] == {**first, "wide": True, **times, "cublas": True}
    assert (tmp_path / "copies" / "tune.json").read_text() == cache.read_text()
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]  # no temporary file
    lines = capsys.readouterr().out.splitlines()
    row = ["float32", "tf32x3", "256", "wide", "100.0", "94.0", "cuBLAS"]
    assert lines[1].split() == row
    assert lines[2].split()[-1] == "Triton" and lines[-2] == f"wrote {cache}"


def test_each_way_is_measured_at_its_precision(
    cache: Path, timings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def microseconds(call: Callable[[], object]) -> float:
        call()
        precision = torch.backends.cuda.matmul.fp32_precision
        measured.append((precision, cublas._forced, len(launch._plans)))
        return 1.0

    monkeypatch.setattr(tune, "_microseconds", microseconds)
    monkeypatch.setattr(tune, "SIZES", (64,))  # Triton serves both ways: the machine is slow
    monkeypatch.setattr(cublas, "DTYPES", (F32,))
    assert tune.tune(GPU, seconds=3600.0)
    for_wide = [(p, way, 1) for p in ("ieee", "tf32") for way in (False, True)]
    assert measured == for_wide * 2  # and for narrow loads


def test_what_fails_or_is_late_is_left_out(
    cache: Path, timings: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    timings += [torch.OutOfMemoryError("out of memory\nmuch text"), 100.0, 1.0]
    assert tune.tune(CPU)
    assert "not measured: out of memory\n" in capsys.readouterr().out
    assert by_cublas((256, 256), "tf32") and not by_cublas((256, 256))
    cache.unlink()
    assert not tune.tune(CPU, seconds=-1.0)
    assert "time is up" in capsys.readouterr().out and not cache.exists()


def test_an_interrupt_keeps_what_is_measured(cache: Path, timings: list[Any]) -> None:
    timings += [100.0, 1.0, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        tune.tune(CPU)
    assert cublas._forced is None and by_cublas((256, 256))
    table = json.loads(cache.read_text())
    table["classes"].append({**table["classes"][0], "operation": "gram", "size": 512})
    cache.write_text(json.dumps(table))
    cublas.chosen.cache_clear()
    assert by_cublas((256, 256)) and not by_cublas((512, 512))  # a row of earlier versions


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", json.dumps({**HERE, "gpu": "other", "classes": []}),
     json.dumps({**HERE, "classes": [{"cublas": True}]}), "\x80"],
)  # fmt: skip
def test_a_bad_table_warns_once(cache: Path, content: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content, encoding="latin-1")
    with pytest.warns(RuntimeWarning, match=r"Made-Up-2.*\.json is not used.* tune") as caught:
        assert cublas.chosen(CPU) == cublas.RULE
        assert cublas.chosen(CPU) == cublas.RULE
    assert len(caught) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda:99"])
def test_without_a_gpu_the_program_ends_with_2(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tnt_kernels", "tune", "--device", device])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("tnt_kernels", run_name="__main__")
    assert capsys.readouterr().err == f"nothing to measure: there is no GPU {device}\n"


# The results.


@pytest.fixture
def all_by_cublas() -> Iterator[None]:
    with cublas.only(True):
        yield


@pytest.mark.usefixtures("all_by_cublas")
@pytest.mark.parametrize("kind", ["full", "mixed"])
@pytest.mark.parametrize("variant", ["gram_ema_ whitened", "mode_products", "preconditioned_step_"])
def test_large_and_small_in_one_call(variant: str, kind: str) -> None:
    given = call(variant, SHAPES, kind, grad_dtype=(F32, torch.bfloat16))
    wanted = given.double()(reference)
    for tensors in (given, given.copy()):
        agree(tensors(triton_operators), wanted, tensors)


@pytest.mark.usefixtures("all_by_cublas")
def test_parameters_that_are_not_finite_show_where_nothing_is_kept() -> None:
    given = call("preconditioned_step_", [(256, 300)], "full")
    given = given.with_arguments(lr=2.0, weight_decay=0.5)
    given.arguments["params"][0][3, 4] = torch.nan
    params = given(triton_operators)["params"][0]
    assert params[3, 4].isnan() and params.isnan().sum() == 1


@pytest.mark.usefixtures("all_by_cublas")
def test_factors_are_read_by_rows() -> None:
    """As Triton does: the definition does not rest on their symmetry."""
    tensor, factors = normal((256, 300)), [normal((256, 256)), normal((300, 300))]
    product = triton_operators.mode_products([tensor], [factors])[0]
    close(product, reference.mode_products([tensor.double()], [[a.double() for a in factors]])[0])


class TestContract(EveryOperator, Gram, Steps):
    """Small matrices too: the contract's layouts, dtypes and numbers."""

    functions = triton_operators
    operators = (
        *("gram_ema_ whitened", "mode_products"),
        *("preconditioned_step_", "grafted_directions_"),
    )
    shapes: ClassVar[Sequence[Shape]] = [(33, 9), (9, 65), (7,)]
    kinds: ClassVar[Sequence[str]] = ("full",)
    alone_to_the_bit = False  # a BLAS may choose its algorithm by alignment

    @pytest.fixture(autouse=True)
    def _no_least_size(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(cublas, "LEAST", 1)
        with cublas.only(True):
            yield
