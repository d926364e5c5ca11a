"""What the Makefile installs, and where PyTorch comes from: an index that answers, refuses, hangs.

Every index is a server on this machine, with packages of no content.
"""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, python

from tools import environment

PROGRAM = ROOT / "tools" / "environment.py"
FILES = sorted((ROOT / "requirements").glob("*.txt"))


class Index:
    """A package index of a folder; it keeps the paths that were asked for."""

    def __init__(self, folder: Path, *packages: str, answers: float = float("inf")) -> None:
        self.asked: list[str] = []
        for package in packages:
            name, version = package.split("==")
            write_wheel(folder / name, name, version)
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                if len(index.asked) > answers:
                    self.send_error(503)
                else:
                    super().do_GET()

            def log_message(self, *arguments: Any) -> None:
                pass

        handler = partial(Handler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def write_wheel(folder: Path, name: str, version: str) -> None:
    """An empty package; PyTorch's depends on another."""
    folder.mkdir(parents=True, exist_ok=True)
    needs = "Requires-Dist: small\n" if name == "torch" else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Callable[..., Index]]:
    """Starts indexes: index(name, *packages)."""
    started = []

    def start(name: str, *packages: str, **options: Any) -> Index:
        (tmp_path / name).mkdir()
        started.append(Index(tmp_path / name, *packages, **options))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture
def refuses() -> str:
    """The address of a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def hangs() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(environment, "has_gpu", lambda: False)


def test_an_index_that_answers(
    no_gpu: None, index: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = index("cpu", "torch==2.13.0+cpu").url
    monkeypatch.setattr(environment, "CPU_INDEX", url)
    source = environment.choose({"find-links": "/wheels"})
    assert source.added == url
    assert source.line.startswith(f"PyTorch comes from {url}, because this machine shows no NVIDIA")
    assert "0.3 GB" in source.line and "\n" not in source.line


@pytest.mark.parametrize(("kind", "why"), [("refuses", "refused"), ("hangs", "timed out")])
def test_an_index_that_does_not_answer(
    kind: str,
    why: str,
    no_gpu: None,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pip's own sources, after the patience of half a second."""
    url = request.getfixturevalue(kind)
    monkeypatch.setattr(environment, "CPU_INDEX", url)
    monkeypatch.setattr(environment, "PATIENCE", 0.5)
    source = environment.choose({})
    assert source.added is None
    assert "PyPI" in source.line and url in source.line and why in source.line
    assert "3 GB" in source.line and "\n" not in source.line
    configured = environment.choose({"find-links": "/wheels"})
    assert configured.added is None and "configuration says (find-links)" in configured.line


def test_an_index_without_pytorch_does_not_answer(
    no_gpu: None, index: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "CPU_INDEX", index("cpu", "small==1.0").url)
    source = environment.choose({})
    assert source.added is None and "not found" in source.line


@pytest.mark.parametrize("key", ["index-url", "no-index"])
def test_a_configured_index_is_respected(
    key: str, no_gpu: None, index: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is asked, unless TORCH_INDEX names it."""
    cpu = index("cpu", "torch==2.13.0+cpu")
    monkeypatch.setattr(environment, "CPU_INDEX", cpu.url)
    source = environment.choose({key: "https://mirror.example/simple"})
    assert source.added is None and f"configuration says ({key})" in source.line and cpu.asked == []
    monkeypatch.setenv("TORCH_INDEX", cpu.url)
    source = environment.choose({key: "https://mirror.example/simple"})
    assert source.added == cpu.url and "TORCH_INDEX" in source.line


@pytest.mark.parametrize(
    ("script", "gpu"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'", True),
        ("echo 'No devices were found'", False),
        ("echo 'GPU 0'; exit 9", False),
    ],
)
def test_a_gpu(
    script: str,
    gpu: bool,
    index: Callable[..., Index],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GPU no other index is asked."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    cpu = index("cpu", "torch==2.13.0+cpu")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(environment, "CPU_INDEX", cpu.url)
    source = environment.choose({})
    assert source.added == (None if gpu else cpu.url)
    assert (cpu.asked == []) == gpu
    assert not gpu or "has an NVIDIA GPU" in source.line


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing in it, to copy: that is faster than to make one."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def copied(empty: Path, tmp_path: Path) -> Path:
    """The folder of a copy, for set_up()."""
    shutil.copytree(empty, tmp_path / "venv", symlinks=True)
    return tmp_path


def set_up(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program in an environment of its own, with these variables as pip's configuration."""
    requirements = folder / "requirements.txt"
    requirements.write_text("torch==2.13.0\nsmall==1.0\n")
    clean = {k: v for k, v in os.environ.items() if not re.match("PIP_|TORCH_|.*_proxy", k, re.I)}
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "venv"), "-r", str(requirements)],
        env={**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", **variables},
        capture_output=True,
        text=True,
    )


def packages(folder: Path) -> set[str]:
    found = folder.glob("venv/lib/python3*/site-packages/*.dist-info")
    return {path.name.removesuffix(".dist-info") for path in found}


def test_only_pytorch_comes_from_its_index(index: Callable[..., Index], copied: Path) -> None:
    """A second run asks no index for anything."""
    main = index("main", "torch==2.13.0", "small==1.0")
    cpu = index("cpu", "torch==2.13.0+cpu", "small==1.0")
    variables = {"PIP_INDEX_URL": main.url, "TORCH_INDEX": cpu.url}
    done = set_up(copied, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"torch-2.13.0+cpu", "small-1.0"} <= packages(copied)
    assert all(path.startswith("/torch/") for path in cpu.asked)
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(f"PyTorch comes from {cpu.url}")
    assert last == f"PyTorch 2.13.0+cpu is in {copied / 'venv'}."
    asked = len(cpu.asked), len(main.asked)
    assert set_up(copied, **variables).returncode == 0
    assert (len(cpu.asked), len(main.asked)) == asked


@pytest.mark.parametrize("kind", ["refuses", "fails later"])
def test_without_its_index_pytorch_comes_from_the_main_one(
    kind: str, index: Callable[..., Index], copied: Path, request: pytest.FixtureRequest
) -> None:
    main = index("main", "torch==2.13.0", "small==1.0")
    if kind == "fails later":
        added = index("cpu", "torch==2.13.0+cpu", answers=2).url
    else:
        added = request.getfixturevalue(kind)
    done = set_up(copied, PIP_INDEX_URL=main.url, TORCH_INDEX=added)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"torch-2.13.0", "small-1.0"} <= packages(copied)
    assert "Traceback" not in done.stdout + done.stderr


def test_a_package_that_no_index_has(index: Callable[..., Index], tmp_path: Path) -> None:
    """pip's own error, which names it; in an environment that the program makes."""
    main = index("main", "torch==2.13.0")
    done = set_up(tmp_path, PIP_INDEX_URL=main.url)
    assert done.returncode == 1 and "No matching distribution found for small" in done.stderr


def test_python_that_is_too_old() -> None:
    """One line, from a file that Python 3.8 can read."""
    ast.parse(PROGRAM.read_text(encoding="utf-8"), feature_version=(3, 8))
    code = f"""
import runpy, sys
sys.version_info, sys.argv = (3, 10, 4, "final", 0), ["environment.py", "venv"]
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""
    done = python("-c", code)
    assert done.returncode == 1 and done.stdout == ""
    (error,) = done.stderr.splitlines()
    assert error.startswith("Python 3.11 or later is needed, ")
    assert error.endswith("is 3.10.4: make PYTHON=...")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_package_is_pinned_once(path: Path) -> None:
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    assert first.startswith(f"# What `make {path.stem}` ")
    pins = [line for line in lines if line and not line.startswith(("#", "-r "))]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    others = {line for other in FILES if other != path for line in other.read_text().splitlines()}
    assert not {pin.split("==")[0] for pin in pins} & {line.split("==")[0] for line in others}


def test_the_demo_needs_no_other_packages(tmp_path: Path) -> None:
    """It runs without what the other verbs install."""
    normal = partial(re.sub, "[-_.]+", "-")
    pins = {
        normal(line.split("==")[0]).lower()
        for path in FILES
        for line in path.read_text().splitlines()
        if path.stem != "demo" and "==" in line
    }
    found = packages_distributions().items()
    blocked = [module for module, names in found if {normal(n).lower() for n in names} & pins]
    assert {"pytest", "heavyball", "mypy"} <= set(blocked)
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
    code += "import runpy; sys.argv = ['experiments', 'demo', '--epochs', '2']\n"
    code += "runpy.run_module('experiments', run_name='__main__')"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "python")])
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "demo" / "digits.png").exists()
