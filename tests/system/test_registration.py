"""The operators under torch.compile, under autocast, and without the extension."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPES, SHAPES, STATE_DTYPES, close, flat, identical, normal, scalar
from commands import python
from operators import NORMS, NUMBERS, VARIANTS, Call, call, everything
from torch import Tensor

import tnt_kernels

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def numbered(given: Call, value: float) -> Call:
    """The numbers of a call as 0-dim tensors, all with the same value."""
    return given.with_arguments(**dict.fromkeys(NUMBERS[given.name], scalar(value)))


@every_variant
def test_compiles(variant: str) -> None:
    """In one graph that serves other values, with the eager result, written and returned."""
    torch.compiler.reset()
    shapes = [(9, 5), (9,), (65, 3), (5, 9, 3), (3, 0, 2)]
    given = call(variant, shapes, dtype=DTYPES)
    function = getattr(tnt_kernels, given.name)
    whole_graph = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled = SimpleNamespace(**{given.name: whole_graph})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for value in (0.1, 0.2, 0.7):
            wanted = everything(numbered(given.copy(), value)())
            traced = numbered(given.copy(), value)(compiled)
            identical(everything(traced), wanted)


def test_page_for_a_bug_report() -> None:
    """``python -m tnt_kernels`` prints the table; with the extension nothing warns."""
    result = python("-W", "error", "-m", "tnt_kernels", **ONE_THREAD)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tnt_kernels.backends()}\n"
    assert result.stderr == ""


def results_of_everything() -> list[Tensor]:
    """Every operator's results on a list of every shape, and three steps of TNT."""
    torch.manual_seed(1)
    results: list[Tensor] = []
    for variant in VARIANTS:
        given = call(variant, SHAPES, dtype=STATE_DTYPES)
        written = given()
        for key in set(NORMS) & written.keys():  # float64 numbers computed from float32 ones
            written[key] = written[key].float()
        if given.name == "inverse_root":  # the reference's iteration stops at 1e-6 in any dtype
            written["factors"] = [[factor.float() for factor in row] for row in written["factors"]]
        results += everything(written)

    from tnt_optim import TNT

    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = TNT.paper(
        model.parameters(),
        lr=0.1,
        damping=0.1,
        stat_interval=1,
        inverse_interval=2,
        likelihood="categorical",
    )
    for _ in range(3):
        output = model(normal((8, 9)))
        optimizer.zero_grad()
        optimizer.observe(output)
        torch.nn.functional.cross_entropy(output, torch.arange(8) % 3).backward()
        optimizer.step()
    return results + [p.detach() for p in model.parameters()]


WITHOUT_EXTENSION = """
import re
import sys, warnings
for extension in ("_ops", "_host"):
    sys.modules[f"tnt_kernels.{extension}"] = None  # importing it now raises ImportError
sys.path[:0] = ["tests", "tests/system"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    before = len(caught)
    import tnt_kernels, tnt_optim
    from test_registration import results_of_everything
    torch.save(results_of_everything(), sys.argv[1])
    for warning in caught[before:]:
        print(warning.category.__name__, str(warning.message).replace("\\n", " "))
print({served["cpu"] for served in tnt_kernels.backends().ops.values()})
print(tnt_kernels.backends().versions["extension"])
with torch.autocast("cpu", torch.bfloat16):
    torch.save(results_of_everything(), sys.argv[2])
"""


@pytest.fixture(scope="module")
def without_extension(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Path]]:
    """What a process without the extension prints, and its results outside and in autocast."""
    folder = tmp_path_factory.mktemp("results")
    paths = [folder / name for name in ("outside.pt", "inside.pt")]
    result = python("-c", WITHOUT_EXTENSION, *map(str, paths), **ONE_THREAD)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), paths


def test_without_the_extension(without_extension: tuple[list[str], list[Path]]) -> None:
    """One warning that says what to do, and everything works, with the same numbers."""
    (*warned, served, extension), paths = without_extension
    assert len(warned) == 1, warned
    assert warned[0].startswith("RuntimeWarning tnt_kernels runs on its reference implementation")
    assert "pip install" in warned[0]
    assert (served, extension) == ("{'reference'}", "not built")
    wanted = results_of_everything()
    actual = torch.load(paths[0], weights_only=True)
    for tensor, value in zip(flat(actual), wanted, strict=True):
        if value.is_floating_point():
            close(tensor, value)
        else:
            identical(tensor, value)


OTHER = """
import sys, types, warnings
import torch
{change}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tnt_kernels
table = tnt_kernels.backends()
print({{served["cpu"] for served in table.ops.values()}}, table.versions["lists"])
print(*(str(warning.message) for warning in caught))
"""


def test_another_torch() -> None:
    """The operators serve it; what stands on PyTorch's C++ interface does not touch it."""
    result = python("-c", OTHER.format(change='torch.__version__ = "2.99.0"'), **ONE_THREAD)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "{'C++'} Python\n\n"


def test_operators_of_other_schemas_are_not_used() -> None:
    """They would read other types than they get."""
    change = 'sys.modules["tnt_kernels._ops"] = types.SimpleNamespace(signatures="")'
    result = python("-c", OTHER.format(change=change), **ONE_THREAD)
    assert result.returncode == 0, result.stderr
    served, warned = result.stdout.splitlines()
    assert served == "{'reference'} C++"
    assert "could not be loaded (it was built for another version of this package)" in warned
    assert "pip install" in warned


def test_autocast_leaves_the_reference_alone(
    without_extension: tuple[list[str], list[Path]],
) -> None:
    """It would round the products to half precision."""
    outside, inside = (torch.load(path, weights_only=True) for path in without_extension[1])
    operators = len(inside) - 4  # without the model, whose forward autocast is for
    identical(inside[:operators], outside[:operators])
