"""The house rules: who may import whom, what C++ may include, what each layer offers."""

import ast
import inspect
import re
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from operators import WRITTEN

import tnt_kernels
import tnt_optim
from tnt_kernels import formulas, reference
from tnt_kernels.calls import NAMESPACE
from tnt_kernels.operators import OPERATORS
from tnt_optim.options import OPTIONS

ROOT = Path(__file__).parents[1]
PACKAGES = {"tnt_kernels": ROOT / "tnt_kernels", "tnt_optim": ROOT / "python" / "tnt_optim"}

# Measuring programs share tnt_kernels.benchmark and tools.measuring, and nothing else.
MEASURING = {name: ROOT / name for name in ("bench", "experiments")}

# What the layers of tnt_kernels may import from it: never each other. __init__, __main__ and
# backends wire them, and may import everything; only __main__ imports the benchmark.
LAYERS: dict[str, set[str]] = {
    "operators": {"arguments", "calls", "formulas"},
    "calls": {"arguments", "lists"},
    "formulas": {"arguments"},
    "arguments": set(),
    "lists": {"_host", "arguments"},
    "reference": {"operators"},
    "triton": {"lists", "triton"},
    "benchmark": {*OPERATORS, "backends", "benchmark", "reference", "triton"},
}
# What tnt_optim may import from tnt_kernels.
PUBLIC_FUNCTIONS = {*OPERATORS, "backends"}
NOT_IMPORTED = {
    "tests",
    "bench",
    "experiments",
    "tools",
    *(path.stem for path in (ROOT / "tests").glob("*.py")),
}


# Python.


def imports(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Dotted names of everything ``module`` imports, wherever in its source it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, *filter(None, [node.module])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


def forbidden(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Those of its imports that the house rules forbid ``module``."""
    return {
        name
        for name in imports(source, module, is_package=is_package)
        if not _allowed(name.split("."), module.split("."))
    }


def _allowed(name: list[str], module: list[str]) -> bool:
    if module[0] in MEASURING:
        others = {*MEASURING, "tools"} - {module[0]}
        return name[0] not in others or name[:2] == ["tools", "measuring"]
    if name[0] in NOT_IMPORTED:
        return False
    if module[0] == "tnt_optim" and name[0] == "tnt_kernels":
        return len(name) == 2 and name[1] in {*PUBLIC_FUNCTIONS, "__version__"}
    if module[0] == "tnt_kernels":
        if name[0] == "tnt_optim":
            return False
        layer = module[1] if len(module) > 1 else ""
        if layer == "operators" and name[:2] == ["tnt_kernels", "operators"]:
            # The package has the table of its files; a file may use another's definition.
            return len(module) == 2 or name[3:] == ["definition"]
        if name[:2] == ["tnt_kernels", "benchmark"] and layer not in ("benchmark", "__main__"):
            return False  # `import tnt_kernels` does not import it
        if name[0] == "tnt_kernels" and layer in LAYERS:
            return len(name) > 1 and name[1] in LAYERS[layer]
    return True


def modules() -> list[tuple[str, Path]]:
    """Every module of the packages by dotted name, and the build script."""
    found = [("setup", ROOT / "setup.py")]
    for package, folder in {**PACKAGES, **MEASURING}.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports(module: str, path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert forbidden(path.read_text(), module, is_package=is_package) == set()


def test_all_layers_exist() -> None:
    """Under the names that the rules use."""
    names = {name for name, _ in modules()}
    assert names >= {"setup", "tnt_kernels", "tnt_kernels.backends", "tnt_optim", "tnt_optim.tnt"}
    assert names >= {f"tnt_kernels.{layer}" for layer in LAYERS}
    files = {name.split(".")[2] for name in names if name.startswith("tnt_kernels.operators.")}
    assert files == {name.rstrip("_") for name in OPERATORS}
    assert names >= {f"tnt_kernels.triton.{file}" for file in files}
    assert not (ROOT / "python" / "__init__.py").exists()


# The definitions of tnt_kernels.


def uses(source: str, module: str, *starts: str) -> set[str]:
    """Dotted names that the bodies of these functions use, and those of the functions they call.

    A name of ``module`` itself has its name in front.
    """
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found: set[str] = set()
    left = list(starts)
    while left:
        body = ast.Module(functions[left.pop()].body, [])
        for node in ast.walk(body):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add(f"{imported.get(node.value.id, node.value.id)}.{node.attr}")
            if isinstance(node, ast.Name) and node.id in imported:
                found.add(imported[node.id])
            if isinstance(node, ast.Name) and node.id in functions:
                if f"{module}.{node.id}" not in found:
                    left.append(node.id)
                found.add(f"{module}.{node.id}")
    return found


def of_the_implementation(used: set[str]) -> set[str]:
    """What a definition may not use: the dispatcher, public operators, calls and checks."""
    types = {f"tnt_kernels.arguments.{name}" for name in ("Modes", "Number", "Tensors")}
    # Formulas, definitions, and private helpers, which are followed.
    allowed = re.compile(r"tnt_kernels\.(formulas\.\w+|operators\.\w+\.(definition|_\w+))")
    return {
        name
        for name in used - types
        if name.startswith(("tnt_kernels.", "torch.ops")) and not allowed.fullmatch(name)
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_definitions_call_no_implementation(name: str) -> None:
    module = OPERATORS[name].__name__
    source = inspect.getsource(OPERATORS[name])
    assert of_the_implementation(uses(source, module, "definition")) == set()
    # The test sees what the public function uses.
    assert "tnt_kernels.calls.call" in of_the_implementation(uses(source, module, name))


@pytest.mark.parametrize(
    "line",
    [
        "torch.ops.tnt_kernels.gram_ema_()",
        "[public() for _ in x]",
        "call(SCHEMA)",
        "arguments.scalar('x', x)",
        "_helper()",
    ],
)
def test_a_definition_that_does_is_found(line: str) -> None:
    source = (
        "from tnt_kernels import arguments\nfrom tnt_kernels.calls import call\n"
        f"def public(): pass\ndef definition(x):\n    {line}\ndef _helper(): public()\n"
    )
    used = uses(source, "tnt_kernels.operators.one", "definition")
    assert of_the_implementation(used)


def test_formulas_call_no_implementation() -> None:
    source = inspect.getsource(formulas)
    assert (
        of_the_implementation(uses(source, formulas.__name__, *public_functions(formulas))) == set()
    )


# The floors of tnt_optim.


def optimizer_graph() -> dict[str, set[str]]:
    """The modules of tnt_optim that each of them imports, wherever in its source it does."""
    paths = {name: path for name, path in modules() if name.split(".")[0] == "tnt_optim"}
    graph = {}
    for name, path in paths.items():
        found = imports(path.read_text(), name, is_package=path.name == "__init__.py")
        ours = {dotted for dotted in found if dotted.split(".")[0] == "tnt_optim"}
        graph[name] = {d if d in paths else d.rpartition(".")[0] for d in ours} - {name}
    return graph


def test_tnt_optim_has_eight_floors_and_no_cycle() -> None:
    """A floor is the length of the longest chain of imports below a module, itself included."""
    graph, found = optimizer_graph(), {}
    for module in TopologicalSorter(graph).static_order():  # raises if imports go in a circle
        found[module] = 1 + max((found[below] for below in graph[module]), default=0)
    assert found.pop("tnt_optim") > max(found.values())
    assert found.pop("tnt_optim.kfac") == 1 + found["tnt_optim.kfac.kfac"]  # only its name
    assert max(found.values()) <= 8, sorted(found.items(), key=lambda item: item[1])
    # A step's constructors stand on the step, the step on its parts, the parts on the tables.
    order = ("tnt", "kronecker", "step", "update", "state", "modes")
    heights = [found[f"tnt_optim.{name}"] for name in order]
    assert heights == sorted(heights, reverse=True)


# Which modules of tnt_optim import these. Any module above may import the others.
USERS = {
    "tnt": {"tnt_optim"},
    "shampoo": {"tnt_optim"},
    "fallback": {"tnt_optim"},
    "kfac": {"tnt_optim"},
    "kronecker": {"tnt", "shampoo", "kfac"},
    "attach": {"kronecker"},
    "distributed": {"kronecker", "kfac"},
}


@pytest.mark.parametrize("name", USERS)
def test_users(name: str) -> None:
    users = {
        module.split(".")[1] if "." in module else module
        for module, below in optimizer_graph().items()
        if any(f"{dotted}.".startswith(f"tnt_optim.{name}.") for dotted in below)
    }
    assert users - {name} == USERS[name]


FRAMES = r"\b(f_back|f_code|f_globals|f_locals|_getframe|walk_stack|currentframe|inspect\.stack)\b"


def test_nobody_looks_at_the_callers() -> None:
    """Their frames and variables are private to them. Only a warning looks for the user's line."""
    readers = {
        (path.stem, name)
        for folder in PACKAGES.values()
        for path in sorted(folder.rglob("*.py"))
        for name in re.findall(FRAMES, path.read_text())
    }
    assert readers == {("messages", name) for name in ("_getframe", "f_back", "f_code")}


def test_packages_are_used_through_their_names() -> None:
    """Only KFAC, which divides its own work over processes, uses the modules of distributed."""
    for module, below in optimizer_graph().items():
        for package in ("tnt_optim.distributed", "tnt_optim.kfac"):
            if not module.startswith((package, "tnt_optim.kfac")):
                assert not any(dotted.startswith(f"{package}.") for dotted in below), module


# C++.

_LIBRARY = re.compile(r'#\s*include\s*[<"]((?:ATen|c10|torch|caffe2|pybind11|cuda|mkl)[^>"]*)[>"]')
_BLAS = re.compile(r"\b[sd](?:gemm|gemv|syrk|symm|trmm|trsm|potr[fis]|getr[fis]|syev\w*?)_\b")
# What every PyTorch from 2.11 on has, and the files that may use it.
_STABLE = re.compile(r"torch/(?:csrc/stable|headeronly)/|torch/csrc/inductor/aoti_torch/c/shim\.h$")
_USE_STABLE = {"bindings.cpp", "tensors.h", "cpu/tasks.h"}
# The module for one version of PyTorch.
_HOST = "lists.cpp"


def forbidden_in_kernels(source: str, path: str) -> set[str]:
    """Includes and BLAS calls that a file of csrc, by its path there, may not have."""
    found = set() if path in ("cpu/blas.h", "cpu/blas.cpp") else set(_BLAS.findall(source))
    if path == _HOST:
        return found
    libraries = set(_LIBRARY.findall(source))
    if path in _USE_STABLE:
        libraries = {name for name in libraries if not _STABLE.match(name)}
    return found | libraries


def sources() -> list[str]:
    folder = ROOT / "csrc"
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".h", ".cpp")
    )


@pytest.mark.parametrize("path", sources())
def test_includes(path: str) -> None:
    assert forbidden_in_kernels((ROOT / "csrc" / path).read_text(), path) == set()


# What each layer offers.

SIGNATURES = {
    "gram_ema_": "stats, tensors, decay, factors=None",
    "damped_inverse": "stats, damping, out=None, relative=False",
    "inverse_root": "stats, damping, root, out=None, relative=False",
    "mode_products": "tensors, factors",
    "preconditioned_step_": "params, momenta, grads, factors, lr, momentum, weight_decay",
    "scaled_step_": "params, directions, lr, weight_decay, decayed=None, scales=None",
    "grafted_directions_": (
        "momenta, grads, factors, momentum, second_moments=None, counts=None, out=None, *, "
        "second_decay=0.99, eps=1e-08, nesterov=False"
    ),
}
TNT_SIGNATURE = (
    "params, lr=0.01, *, likelihood=None, damping=0.3, momentum=0.9, nesterov=None, "
    "stat_decay=0.9, weight_decay=0.0, stat_interval=10, inverse_interval=50, "
    "interval_warmup=None, estimator='mle', max_factor_dim=4096, relative_damping=True, "
    "early_roots=None, graft='adam', precondition_1d=False, seed=0, capturable=False, "
    "block_size=None, merge_small_dims='kernel', maximize=False, rounding='nearest', "
    "process_group=None, shard=None, **unknown"
)
SHAMPOO_SIGNATURE = (
    TNT_SIGNATURE.replace("likelihood=None, ", "")
    .replace("estimator='mle', ", "")
    .replace("damping=0.3", "damping=0.001")
    .replace("nesterov=None", "nesterov=False")
    .replace("interval_warmup=None", "interval_warmup=500")
    .replace("early_roots=None, ", "")
    .replace("seed=0, ", "")
)
KFAC_SIGNATURE = (
    "model, lr=0.01, *, params=None, damping=0.01, momentum=0.9, stat_decay=0.9, "
    "weight_decay=0.0, stat_interval=10, inverse_interval=50, interval_warmup=500, "
    "likelihood=None, inverse='damped', max_factor_dim=8192, relative_damping=True, "
    "graft='adam', seed=0, process_group=None, shard=None, **unknown"
)


def signature(function: Callable[..., object]) -> str:
    """Names, order, kinds and defaults, without annotations."""
    bare = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=bare.empty))[1:-1]


def public_functions(module: ModuleType) -> set[str]:
    """The functions a module defines itself, those with a leading underscore aside."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and inspect.unwrap(value).__module__ == module.__name__
        and not name.startswith("_")
    }


def test_every_operator_has_a_function_and_a_definition() -> None:
    assert list(SIGNATURES) == list(OPERATORS) == reference.__all__
    assert set(tnt_kernels.__all__) == {*PUBLIC_FUNCTIONS, "Backends", "reference"}
    for name, file in OPERATORS.items():
        assert file.SCHEMA.startswith(f"{name}(")
        fakes = set() if file.SCHEMA.endswith("-> ()") else {"fake"}
        assert public_functions(file) == {name, "definition", "from_flat"} | fakes
        assert getattr(tnt_kernels, name) is getattr(file, name)
        assert getattr(reference, name) is file.definition


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("module", [tnt_kernels, reference], ids=["public", "reference"])
def test_signatures_of_operators(name: str, module: ModuleType) -> None:
    assert signature(getattr(module, name)) == SIGNATURES[name]


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (tnt_optim.TNT, TNT_SIGNATURE),
        (tnt_optim.Shampoo, SHAMPOO_SIGNATURE),
        (tnt_optim.KFAC, KFAC_SIGNATURE),
    ],
)
def test_signatures_of_optimizers(optimizer: type, wanted: str) -> None:
    assert signature(optimizer) == wanted


@pytest.mark.parametrize("optimizer", [tnt_optim.TNT, tnt_optim.Shampoo])
def test_signatures_have_the_options_of_the_table(optimizer: type) -> None:
    own = inspect.signature(optimizer).parameters.keys() - {"params", "unknown"}
    assert own <= OPTIONS.keys()
    documented = inspect.getdoc(optimizer)
    assert documented is not None
    assert all(f"\n    {name}: " in documented for name in own)


@pytest.mark.parametrize("name", OPERATORS)
def test_schemas_name_what_is_mutated(name: str) -> None:
    schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == set(WRITTEN[name])
    # In-place names end in _; what else is written is called out.
    assert name.endswith("_") == bool(written - {"out"})
