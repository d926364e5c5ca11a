"""The build: with PyTorch missing, with no C++ compiler, with one that fails, and as it should be.

Everything is built from a copy of the checkout, so that nothing lands in it.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import scipy_openblas32
from commands import ROOT, python

import tnt_kernels  # noqa: F401 - loads its extensions

STEP = """
import sys
sys.path.insert(0, sys.argv[1])  # before the checkout, which an editable install also names
import torch
import tnt_kernels, tnt_optim
extensions = [sys.modules[f"tnt_kernels.{name}"] for name in ("_ops", "_host")]
for module in (tnt_kernels, tnt_optim, *extensions):
    print(module.__file__)
model = torch.nn.Linear(9, 5)
before = model.weight.detach().clone()
optimizer = tnt_optim.TNT(model.parameters(), lr=0.1, damping=0.1, likelihood="categorical")
output = model(torch.randn(8, 9))
optimizer.observe(output)
torch.nn.functional.cross_entropy(output, torch.arange(8) % 5).backward()
optimizer.step()
print(tnt_kernels.backends().ops["gram_ema_"]["cpu"])
print(bool((model.weight != before).all()), bool(model.weight.isfinite().all()))
"""

COMMAND = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
try:
    runpy.run_module("tnt_kernels", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert ended.code == 0
assert not {"tnt_optim", "bench", "tools"} & sys.modules.keys()
"""


def copy_of_the_checkout(folder: Path) -> Path:
    """What is, or is about to be, under version control: no build products."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build_wheel(
    folder: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Builds a copy of the checkout as a user would; returns what pip said, and the wheels."""
    source, wheels = copy_of_the_checkout(folder / "source"), folder / "wheels"
    pip = ["-m", "pip", "--disable-pip-version-check", "wheel", "-v", "--no-build-isolation"]
    pip += ["--no-deps", "--no-index", "-w", str(wheels), "."]
    result = python(*pip, cwd=source, **environment)
    return result, sorted(wheels.glob("*.whl"))


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def python_files() -> set[str]:
    """What every wheel must hold: both packages, whole."""
    folders = {"tnt_kernels": ROOT / "tnt_kernels", "tnt_optim": ROOT / "python" / "tnt_optim"}
    return {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".typed")
    }


# Runs setup.py without PyTorch (blocked), or with the environment's packages hidden as build
# isolation hides them: of these only setuptools and OpenBLAS can be imported.
WITHOUT_PYTORCH = "import sys; sys.modules['torch'] = None"
ISOLATED = """
import importlib, sys, sysconfig
for name in ("setuptools", "scipy_openblas32"):
    importlib.import_module(name)
sys.path.remove(sysconfig.get_path("purelib"))
"""


def run_setup(
    prelude: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport runpy; sys.argv = ['setup.py', *{arguments!r}]\n"
    code += "runpy.run_path('setup.py', run_name='__main__')"
    return python("-c", code, **environment)


def test_an_editable_install_works_beside_the_clone(tmp_path: Path) -> None:
    """A folder in the working directory with the package's name does not hide the package."""
    clone = copy_of_the_checkout(tmp_path / "tnt_kernels")
    made = python("setup.py", "-q", "editable_wheel", "-d", str(tmp_path), cwd=clone, TNT_CPU="0")
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        path = wheel.read(name).decode().strip()
    code = f"import sys; sys.path.append({path!r}); import tnt_kernels, tnt_optim"
    code += "; print(tnt_kernels.__file__, tnt_optim.__file__)"
    packages = sysconfig.get_path("purelib")
    found = python("-W", "ignore", "-S", "-c", code, cwd=tmp_path, PYTHONPATH=packages)
    assert found.stdout.split() == [
        str(clone / ".editable" / package / "__init__.py")
        for package in ("tnt_kernels", "tnt_optim")
    ], found.stderr


def test_without_pytorch() -> None:
    """A sentence that says what to install, not a traceback; not needed to pack the sources."""
    result = run_setup(WITHOUT_PYTORCH, "build", "--help")
    assert result.returncode != 0
    assert "Traceback" not in result.stdout + result.stderr
    assert "pip install 'torch>=2.11'" in result.stderr and "--no-build-isolation" in result.stderr
    result = run_setup(WITHOUT_PYTORCH, "sdist", "--help")
    assert result.returncode == 0, result.stderr


def test_build_isolation_does_not_hide_pytorch() -> None:
    result = run_setup(ISOLATED, "build", "--help")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("environment", "why"),
    [({"CXX": "no-such-compiler"}, "'no-such-compiler'"), ({"TNT_CPU": "0"}, "TNT_CPU=0")],
)
def test_without_the_extension(tmp_path: Path, environment: dict[str, str], why: str) -> None:
    """Without a compiler, or where that was asked for; the build says so."""
    result, wheels = build_wheel(tmp_path, **environment)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "without the C++ extension" in said and why in said
    (wheel,) = wheels
    assert files_in(wheel) == python_files()


@pytest.mark.parametrize(
    ("fails_at", "said"),
    [
        # A compiler that compiles nothing; one without Python's headers.
        ("", "compiler' cannot build Python modules in C++20: this compiler fails. Install GCC 12"),
        ("trial.cpp", "C++20: this compiler fails. Install GCC 12 or later and Python's headers"),
        # One that ends in the middle, for lack of memory as it were.
        ("csrc", "Error compiling objects for extension: the compiler's messages are above"),
    ],
)
def test_a_compiler_that_fails_is_an_error(tmp_path: Path, fails_at: str, said: str) -> None:
    """Not a silently slower package; in one line, without a traceback."""
    compiler = tmp_path / "failing-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *{fails_at}*) echo this compiler fails >&2; exit 1;; esac\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    source = copy_of_the_checkout(tmp_path / "source")
    command = ("setup.py", "--quiet", "build_ext", "--inplace")
    result = python(*command, cwd=source, CXX=str(compiler))
    assert result.returncode != 0 and not list(source.glob("tnt_kernels/*.so"))
    assert said in result.stderr.splitlines()[-1]
    assert "this compiler fails" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert fails_at == "csrc" or (result.stdout, result.stderr.count("\n")) == ("", 1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it should be, built once."""
    result, wheels = build_wheel(tmp_path_factory.mktemp("wheel"))
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = wheels
    return built


def test_wheel(wheel: Path) -> None:
    """Both packages, the markers of their types, the extensions, and nothing else."""
    files = files_in(wheel)
    host, operators = sorted(files - python_files())
    assert operators == "tnt_kernels/_ops.abi3.so"
    assert host.startswith("tnt_kernels/_host.") and host.endswith(".so")
    assert files - {host, operators} == python_files()
    with zipfile.ZipFile(wheel) as archive:  # without debug information
        assert archive.getinfo(host).file_size < archive.getinfo(operators).file_size < 2 * 2**20
    assert {"tnt_kernels/py.typed", "tnt_optim/py.typed"} <= files


def test_the_wheel_names_no_folder_of_the_machine_that_built_it(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("tnt_kernels/_ops.abi3.so", tmp_path)
    listed = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"R(?:UN)?PATH.*\[(.*)\]", listed) == ["$ORIGIN/../scipy_openblas32/lib"]


def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # As pip installs it, next to what it depends on.
    openblas = Path(scipy_openblas32.get_lib_dir()).parent
    (site / openblas.name).symlink_to(openblas)
    # -I: neither the current folder nor the environment adds to the path.
    result = python("-I", "-W", "error", "-c", STEP, str(site), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    *imported, served, moved = result.stdout.splitlines()
    assert len(imported) == 4
    assert all(Path(file).is_relative_to(site) for file in imported)
    assert (served, moved) == ("C++", "True True")
    options = ["bench", "--shape=9x8", "--threads=1", "--seconds=100"]
    result = python("-I", "-W", "error", "-c", COMMAND, str(site), *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "engine C++" in result.stdout
    assert result.stdout.count("| 9x8   | tnt_kernels") == 8


def test_the_operators_use_only_pytorchs_stable_interface() -> None:
    """Its C functions: C++ names change with PyTorch's version."""
    library = sys.modules["tnt_kernels._ops"].__file__
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", "-C", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert {"torch_library_impl", "torch_parallel_for"} <= set(listed.split())
    assert re.findall(r"\b(?:(?:at|c10|caffe2|torch|pybind11)::|THP).*", listed) == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "pip install scipy-openblas32"),
        ({"TNT_CPU": "no"}, "TNT_CPU must be 0 or 1, got 'no'"),
        (
            {"CXX": "ccache g++"},
            "CXX must name one program, as PyTorch's builds want it, got 'ccache g++'",
        ),
    ],
)
def test_what_cannot_be_built(environment: dict[str, str], said: str) -> None:
    """A sentence that says what is missing, not a traceback."""
    without_blas = "import sys; sys.modules['scipy_openblas32'] = None"
    result = run_setup(without_blas, "--quiet", "--version", **environment)
    assert result.returncode != 0
    assert said in result.stderr and "Traceback" not in result.stderr
