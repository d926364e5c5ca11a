"""Installs packages into the Makefile's virtual environment, and chooses PyTorch's build.

    python tools/environment.py VENV -r requirements/demo.txt

It runs before anything is installed: with the standard library alone, and in the syntax of Python
3.8, so that an old Python ends with a one-line message. Everything after VENV goes to pip, whose
configuration (pip.conf, PIP_INDEX_URL, ...) stays in force. Only PyTorch gets one more index, that
of its builds for CPUs, if the machine shows no NVIDIA GPU and the index answers.

Environment variable:

    TORCH_INDEX       another index to add, on a machine with a GPU too, e.g. a mirror
"""

from __future__ import annotations

import fcntl
import os
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Seconds that an index has to answer. PyTorch's takes less than one.
PATIENCE = 5.0
# pip's options that name sources of packages; the first two exclude all other sources.
SOURCES = ("index-url", "no-index", "extra-index-url", "find-links")


class Source(NamedTuple):
    """Where PyTorch comes from."""

    added: str | None  # an index that is added for PyTorch alone
    line: str  # for the user


def main() -> None:
    """Makes the environment if there is none, and installs what is not there yet."""
    venv, *requirements = sys.argv[1:]
    if sys.version_info < (3, 11):  # noqa: UP036 - an older one gets a line instead of an error
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"Python 3.11 or later is needed, {sys.executable} is {version}: make PYTHON=...")
    folder = Path(venv)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:  # make -j installs for several verbs at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(folder, requirements)


def install(venv: Path, requirements: list[str]) -> None:
    """Creates the environment, then runs pip: once for PyTorch, once for everything."""
    python = str(venv / "bin" / "python")
    if not (venv / "bin" / "pip").exists():
        # venv's own message says which package of the system is missing.
        if subprocess.run([sys.executable, "-m", "venv", str(venv)]).returncode:
            sys.exit(f"{sys.executable} -m venv {venv} failed: see above")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    wanted = torch_pin(requirements)
    if wanted and installed(venv, wanted) is None:
        source = choose(pip_configuration(python))
        print(source.line, flush=True)
        if source.added:
            # Without dependencies, so that an index that fails costs one download. The builds there
            # have a suffix (2.13.0+cpu), and pip prefers such a version to the same without one.
            options = ["--retries", "1", "--no-deps", "--extra-index-url", source.added]
            if subprocess.run([*pip, *options, wanted]).returncode:
                print("PyTorch comes from where pip finds it, then.", flush=True)
    if status := subprocess.run([*pip, *requirements]).returncode:
        sys.exit(status)
    if wanted:
        print(f"PyTorch {installed(venv, wanted)} is in {venv}.", flush=True)
    # pip would compile on one core, as long as all the rest takes, and the demo imports little. For
    # tests compile now: in a test, a package's SyntaxWarning would be an error.
    if any(venv.glob("lib/python3*/site-packages/pytest")):
        command = [python, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", str(venv / "lib")]
        subprocess.run(command)


def torch_pin(requirements: list[str]) -> str | None:
    """The requirement on PyTorch, among the arguments of pip or in the files that they name."""
    lines = list(requirements)
    for path in requirements:
        if path.endswith(".txt"):
            lines += Path(path).read_text().splitlines()
    return next((line for line in lines if line.startswith("torch==")), None)


def installed(venv: Path, pin: str) -> str | None:
    """The version of PyTorch in the environment, if the pin allows it."""
    version = pin[len("torch==") :]
    for path in venv.glob("lib/python3*/site-packages/torch-*.dist-info"):
        present = path.name[len("torch-") : -len(".dist-info")]
        if present.split("+")[0] == version.split("+")[0]:
            return present
    return None


def pip_configuration(python: str) -> dict[str, str]:
    """pip's options from its files and from the environment."""
    command = [python, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    pairs = (line.partition("=") for line in lines)  # global.index-url='https://...'
    return {key.rpartition(".")[2]: value.strip("'\"") for key, _, value in pairs}


def choose(configuration: dict[str, str]) -> Source:
    """PyTorch's build for this machine."""
    index = os.environ.get("TORCH_INDEX")
    keys = [key for key in configuration if key in SOURCES]
    because = ""
    if index is None and has_gpu():
        because = ", because this machine has an NVIDIA GPU"
    elif index or not set(SOURCES[:2]) & set(keys):
        address = index or CPU_INDEX
        silence = no_answer(f"{address.rstrip('/')}/torch/", configuration.get("cert"))
        if silence is None:
            why = "TORCH_INDEX names it" if index else "this machine shows no NVIDIA GPU"
            return Source(
                address,
                f"PyTorch comes from {address}, because {why}: with the build for CPUs and the "
                "other packages 0.3 GB to download, 1.2 GB installed.",
            )
        because = f", because {address} {silence}"
    if keys:
        return Source(
            None,
            f"PyTorch comes from where pip's configuration says ({', '.join(keys)}){because}: with "
            "the other packages 0.3 GB to download and 1.2 GB installed if that has the build for "
            "CPUs, 3 and 6.5 GB if it has the CUDA build.",
        )
    return Source(
        None,
        f"PyTorch comes from PyPI{because}: with CUDA and the other packages 3 GB to "
        "download, 6.5 GB installed.",
    )


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU that programs here may use."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:  # Linux under Windows has no such files
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def no_answer(url: str, certificates: str | None) -> str | None:
    """Why the address cannot be used; None if it answers in time."""
    try:
        context = ssl.create_default_context(cafile=certificates)
        with urllib.request.urlopen(url, timeout=PATIENCE, context=context):
            return None
    except Exception as error:
        return f"does not answer ({getattr(error, 'reason', error)})"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
