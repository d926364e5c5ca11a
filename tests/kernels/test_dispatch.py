"""How the operators are registered: opcheck, torch.compile, the backends table, no extension."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from cases import (
    SHAPES,
    STATE_DTYPES,
    close,
    flat,
    identical,
    mode_statistics,
    normal,
    poisoned_like,
    scalar,
    state_dtype,
)
from torch import Tensor

import tnt_kernels
from tnt_kernels import (
    damped_inverse,
    grafted_directions_,
    gram_ema_,
    inverse_root,
    mode_products,
    preconditioned_step_,
)
from tnt_kernels.backends import TRITON_KERNELS
from tnt_kernels.schemas import SCHEMAS

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
EXTENSION_KERNELS = {path.stem for path in (ROOT / "csrc" / "cpu").glob("*.cpp")}
CUDA_KERNELS = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")}

# What a call may hold: nothing; full and diagonal modes; every dtype, and a mode without elements.
LISTS: dict[str, list[tuple[tuple[int, ...], str, torch.dtype]]] = {
    "empty": [],
    "kinds": [((9, 5), kind, torch.float32) for kind in ("full", "diagonal", "mixed")],
    "dtypes": [
        ((9,), "full", torch.float32),
        ((9, 5), "mixed", torch.bfloat16),
        ((65, 3), "mixed", torch.float16),
        ((5, 9, 3), "mixed", torch.float64),
        ((3, 0, 2), "mixed", torch.float32),
    ],
}


class Inputs:
    """Random arguments of every operator for one of the lists above, in public and flat form."""

    def __init__(self, entries: Sequence[tuple[tuple[int, ...], str, torch.dtype]]) -> None:
        self.tensors = [normal(shape, dtype) for shape, _, dtype in entries]
        self.stats = [mode_statistics(s, kind, state_dtype(dtype)) for s, kind, dtype in entries]
        self.grads = [normal(shape, dtype) for shape, _, dtype in entries]
        self.momenta = [normal(shape, state_dtype(dtype)) for shape, _, dtype in entries]
        self.second_moments = [m.square() for m in self.momenta]
        self.counts = torch.arange(1.0, 1 + 2 * len(entries), dtype=torch.float64).view(-1, 2)
        self.directions = poisoned_like(self.momenta)
        self.out = [poisoned_like(row) for row in self.stats]
        self.orders = [len(row) for row in self.stats]
        self.roots = [2 + t % 3 for t in range(len(entries))]

    def flat_arguments(self, name: str) -> tuple[object, ...]:
        """What torch.ops.tnt_kernels takes; ``out`` without NaN, which opcheck cannot compare."""
        stats = flat(self.stats)
        out = [torch.rand_like(stat) for stat in stats]
        arguments: dict[str, tuple[object, ...]] = {
            "gram_ema_": (stats, self.tensors, scalar(0.9)),
            "damped_inverse": (out, stats, self.orders, scalar(0.1), True),
            "inverse_root": (out, stats, self.orders, scalar(0.1), self.roots),
            "mode_products": (self.tensors, stats),
            "preconditioned_step_": (
                self.tensors,
                self.momenta,
                self.grads,
                stats,
                scalar(0.1),
                scalar(0.9),
                scalar(0.01),
            ),
            "grafted_directions_": (
                self.momenta,
                self.second_moments,
                [torch.rand_like(m) for m in self.momenta],
                self.grads,
                stats,
                scalar(0.9),
                self.counts,
                0.95,
                1e-8,
            ),
        }
        return arguments[name]

    def arguments(self, name: str) -> tuple[object, ...]:
        """What the public function takes, its numbers as 0-dim tensors."""
        arguments: dict[str, tuple[object, ...]] = {
            "gram_ema_": (self.stats, self.tensors, scalar(0.9)),
            "damped_inverse": (self.stats, scalar(0.1), self.out, True),
            "inverse_root": (self.stats, scalar(0.1), self.roots, self.out),
            "mode_products": (self.tensors, self.stats),
            "preconditioned_step_": (
                self.tensors,
                self.momenta,
                self.grads,
                self.stats,
                scalar(0.1),
                scalar(0.9),
                scalar(0.01),
            ),
            "grafted_directions_": (
                self.momenta,
                self.grads,
                self.stats,
                scalar(0.9),
                self.second_moments,
                self.counts,
                self.directions,
            ),
        }
        return arguments[name]


def inputs(entries: str) -> Inputs:
    """The same every time."""
    torch.manual_seed(1)
    return Inputs(LISTS[entries])


OPERATORS: dict[str, Callable[..., object]] = {
    "gram_ema_": gram_ema_,
    "damped_inverse": damped_inverse,
    "inverse_root": inverse_root,
    "mode_products": mode_products,
    "preconditioned_step_": preconditioned_step_,
    "grafted_directions_": grafted_directions_,
}


def test_every_operator_is_tested_here() -> None:
    assert list(OPERATORS) == list(SCHEMAS)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("entries", LISTS)
def test_opcheck(name: str, entries: str) -> None:
    arguments = inputs(entries).flat_arguments(name)
    torch.library.opcheck(getattr(torch.ops.tnt_kernels, name).default, arguments)


@pytest.mark.parametrize("name", OPERATORS)
def test_compiles(name: str) -> None:
    """In one graph, with the eager result, in place and returned."""
    torch._dynamo.reset()
    compiled = torch.compile(OPERATORS[name], fullgraph=True, backend="aot_eager")
    for entries in ("kinds", "dtypes"):
        eager, traced = inputs(entries), inputs(entries)
        wanted = [*flat(OPERATORS[name](*eager.arguments(name))), *flat(vars(eager))]
        actual = [*flat(compiled(*traced.arguments(name))), *flat(vars(traced))]
        for tensor, value in zip(actual, wanted, strict=True):
            identical(tensor, value)


@pytest.mark.parametrize("entries", LISTS)
def test_grafting_on_the_momentum_s_length(entries: str) -> None:
    """Without second moments: opcheck, and compiled with the eager result."""
    momenta, _, *rest = inputs(entries).flat_arguments("grafted_directions_")
    none = torch.zeros(0, 2, dtype=torch.float64)
    arguments = (momenta, [], *rest[:4], none, *rest[5:])
    torch.library.opcheck(torch.ops.tnt_kernels.grafted_directions_.default, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(grafted_directions_, fullgraph=True, backend="aot_eager")
    results = []
    for operator in (grafted_directions_, compiled):
        given = inputs(entries)
        returned = operator(given.momenta, given.grads, given.stats, 0.9)
        results.append([*flat(returned), *given.momenta])
    for tensor, value in zip(*results, strict=True):
        identical(tensor, value)


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_as_tensors_do_not_recompile(name: str) -> None:
    """A learning-rate schedule must not compile at every step."""
    torch._dynamo.reset()
    operator = OPERATORS[name]
    numbers = [i for i, a in enumerate(inputs("kinds").arguments(name)) if is_number(a)]
    assert len(numbers) == {"mode_products": 0, "preconditioned_step_": 3}.get(name, 1)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for value in (0.1, 0.2, 0.7):
            eager, traced = inputs("kinds"), inputs("kinds")
            for given, call in ((eager, operator), (traced, compiled)):
                arguments = list(given.arguments(name))
                for i in numbers:
                    arguments[i] = scalar(value)
                call(*arguments)
            for tensor, wanted in zip(flat(vars(traced)), flat(vars(eager)), strict=True):
                identical(tensor, wanted)


def is_number(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.dim() == 0


@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_without_data(name: str) -> None:
    """On meta tensors an operator gives shapes, dtypes and layouts, as tracing wants them."""
    given = inputs("dtypes")
    real = flat(OPERATORS[name](*given.arguments(name)))
    for attribute, value in vars(given).items():
        if attribute not in ("orders", "roots", "counts"):
            on_meta = [
                [t.to("meta") for t in row] if isinstance(row, list) else row.to("meta")
                for row in value
            ]
            setattr(given, attribute, on_meta)
    shapes = flat(OPERATORS[name](*given.arguments(name)))
    assert [(t.shape, t.dtype, t.is_contiguous()) for t in shapes] == [
        (t.shape, t.dtype, t.is_contiguous()) for t in real
    ]
    assert all(tensor.is_meta for tensor in shapes)


# The table of backends.


def test_backends() -> None:
    """Each operator with a file in csrc/cpu is served by it, the others by the reference."""
    table = tnt_kernels.backends()
    assert list(table.ops) == list(SCHEMAS)
    for name, served in table.ops.items():
        written = name.rstrip("_") in EXTENSION_KERNELS
        assert served["cpu"] == ("C++" if written else "reference"), name
        assert list(served) == ["cpu", "cuda"]
        if table.versions["CUDA in extension"] != "none" and name.rstrip("_") in CUDA_KERNELS:
            assert served["cuda"] == "CUDA C++"
        elif torch.version.cuda is None:
            assert served["cuda"] == ("Triton" if name in TRITON_KERNELS else "reference")
    assert "gram_ema" in EXTENSION_KERNELS and "damped_inverse" in CUDA_KERNELS
    versions = table.versions
    assert versions["torch"] == torch.__version__
    assert versions["extension"].startswith("built for torch ")
    assert all(versions[key] not in ("", "none") for key in ("tnt_kernels", "compiler", "BLAS"))


def test_printed_backends() -> None:
    table = tnt_kernels.backends()
    above, below = str(table).split("\n\n")
    rows = [line.split("  ") for line in above.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["operator", "cpu", "cuda"]
    assert cells[1:] == [[name, *served.values()] for name, served in table.ops.items()]
    assert [line.split()[-1] for line in below.splitlines()] == [
        version.split()[-1] for version in table.versions.values()
    ]
    assert all(line == line.rstrip() for line in str(table).splitlines())


# Other interpreters.


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_page_for_a_bug_report() -> None:
    """``python -m tnt_kernels`` prints the table; with the extension nothing warns."""
    result = python("-W", "error", "-m", "tnt_kernels")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tnt_kernels.backends()}\n"
    assert result.stderr == ""


WITHOUT_EXTENSION = """
import sys, warnings
sys.modules["tnt_kernels._C"] = None  # importing it now raises ImportError
sys.path.insert(0, "tests")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    before = len(caught)
    import tnt_kernels, tnt_optim
    from test_dispatch import everything
    results = everything()
    torch.save(results, sys.argv[1])
    for warning in caught[before:]:
        print(warning.category.__name__, str(warning.message).replace("\\n", " "))
print({served["cpu"] for served in tnt_kernels.backends().ops.values()})
print(tnt_kernels.backends().versions["extension"])
"""


def everything() -> list[Tensor]:
    """Every operator's results on a list of every shape, and three steps of TNT."""
    torch.manual_seed(1)
    entries = [(shape, "mixed", STATE_DTYPES[n % 2]) for n, shape in enumerate(SHAPES)]
    given = Inputs(entries)
    results: list[Tensor] = []
    for name, operator in OPERATORS.items():
        returned = flat(operator(*given.arguments(name)))
        if name == "grafted_directions_":
            # Float64 numbers that are made of the lists', some of which are float32.
            returned[-1] = returned[-1].float()
        results += returned
    results += flat(vars(given))

    from tnt_optim import TNT

    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = TNT(model.parameters(), lr=0.1, damping=0.1, stat_interval=1, inverse_interval=2)
    for _ in range(3):
        output = model(normal((8, 9)))
        optimizer.zero_grad()
        optimizer.observe(output)
        torch.nn.functional.cross_entropy(output, torch.arange(8) % 3).backward()
        optimizer.step()
    return results + [p.detach() for p in model.parameters()]


UNDER_AUTOCAST = """
import sys, warnings
sys.modules["tnt_kernels._C"] = None
sys.path.insert(0, "tests")
warnings.simplefilter("ignore")
import torch
from test_dispatch import everything
torch.save(everything(), sys.argv[1])
with torch.autocast("cpu", torch.bfloat16):
    torch.save(everything(), sys.argv[2])
"""


def test_autocast_leaves_the_reference_alone(tmp_path: Path) -> None:
    """It would round the products to half precision."""
    paths = [tmp_path / name for name in ("outside.pt", "inside.pt")]
    result = python("-c", UNDER_AUTOCAST, *map(str, paths))
    assert result.returncode == 0, result.stderr
    outside, inside = (torch.load(path, weights_only=True) for path in paths)
    operators = len(inside) - 4  # without the model, whose forward autocast is for
    for tensor, value in zip(inside[:operators], outside[:operators], strict=True):
        identical(tensor, value)


def test_without_the_extension(tmp_path: Path) -> None:
    """One warning that says what to do, and everything works, with the same numbers."""
    result = python("-c", WITHOUT_EXTENSION, str(tmp_path / "results.pt"))
    assert result.returncode == 0, result.stderr
    *warned, served, extension = result.stdout.splitlines()
    assert len(warned) == 1, warned
    assert warned[0].startswith("RuntimeWarning tnt_kernels runs on its reference implementation")
    assert "pip install" in warned[0]
    assert (served, extension) == ("{'reference'}", "not built")
    wanted = everything()
    actual = torch.load(tmp_path / "results.pt", weights_only=True)
    assert len(actual) == len(wanted)
    for tensor, value in zip(actual, wanted, strict=True):
        if value.is_floating_point():
            close(tensor, value)
        else:
            identical(tensor, value)
