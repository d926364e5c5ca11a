"""What nvcc makes of the CUDA kernels: registers, spills, shared memory and instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from bench.kernels.machine_code import PRODUCTS, Compiled, instructions_by_line, run_tool
from bench.kernels.occupancy import WARP

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ("-std=c++20", "-O3", f"-I{SOURCES}")

_ENTRY = re.compile(
    r"Compiling entry function '(\S+)' for.*?(\d+) bytes stack frame"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")
_THREADS = re.compile(
    r"^\.nv\.info\.(\S+)$(?:(?!^\.nv\.info).)*?EIATTR_MAX_THREADS"
    r".*?Value:\s*0x(\w+) 0x(\w+) 0x(\w+)",
    re.DOTALL | re.MULTILINE,
)
_NAME = re.compile(r"([a-z]+(?:_[a-z]+)*_kernel)(?:I([a-z])E)?")
_TEMPLATE = {"f": "<float>", "d": "<double>"}


def sources() -> list[Path]:
    """Every CUDA file there is now."""
    return sorted((SOURCES / "cuda").glob("*.cu"))


def why_no_compiler() -> str | None:
    """Says why CUDA files cannot be compiled here; None where they can."""
    return None if shutil.which("nvcc") else "nvcc is not on the PATH"


def compiled_file(source: Path, capability: int) -> list[Compiled]:
    """Every kernel of one CUDA file, compiled for one architecture.

    Raises:
        RuntimeError: where nvcc does not compile it, with what it says.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = ["nvcc", *FLAGS, f"-arch=sm_{capability}", "-Xptxas", "-v", "-cubin"]
        done = subprocess.run(
            [*command, "-o", str(cubin), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"nvcc refuses {source.name} for sm_{capability}: {done.stderr}")
        listing = run_tool("nvdisasm", "-c", str(cubin))
        threads = {
            name: int(x, 16) * int(y, 16) * int(z, 16)
            for name, x, y, z in _THREADS.findall(run_tool("cuobjdump", "-elf", str(cubin)))
        }
    sections = dict(re.findall(r"^\.text\.(\w+):$(.*?)(?=^\.text\.|\Z)", listing, _SECTIONS))
    found = []
    for mangled, stack, registers, rest in _ENTRY.findall(done.stderr):
        lines = instructions_by_line(sections.get(mangled, ""))
        counts = Counter(name for line in lines.values() for name, _ in line)
        shared = _SHARED.search(rest)
        bound = threads.get(mangled)
        found.append(
            Compiled(
                kernel=readable(mangled),
                settings={"threads": bound or "not bound"},
                capability=capability,
                registers=int(registers),
                stack=int(stack),
                spill_loads=counts["LDL"],
                spill_stores=counts["STL"],
                shared=int(shared[1]) if shared else 0,
                warps=-(-(bound or WARP) // WARP),
                instructions={name: counts[name] for name in PRODUCTS if counts[name]},
                source=f"{source.parent.name}/{source.name}",
            )
        )
    return sorted(found, key=lambda c: c.kernel)


_SECTIONS = re.DOTALL | re.MULTILINE


def readable(mangled: str) -> str:
    """A kernel's name and template argument.

    >>> readable("_ZN3tnt4cuda12_GLOBAL__N_113invert_kernelIdEEvNS0_4CallE")
    'invert_kernel<double>'
    """
    found = _NAME.search(mangled)
    return found[1] + _TEMPLATE.get(found[2] or "", "") if found else mangled
