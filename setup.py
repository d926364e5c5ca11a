"""Builds two packages, ``tnt_kernels`` and ``tnt_optim``, and one extension, ``tnt_kernels._C``.

    pip install --no-build-isolation -e .

PyTorch must already be installed, because the extension is built against it; that is why build
isolation must be off. Where the extension cannot be built (no C++ compiler, or not x86-64 Linux)
the packages are installed without it and serve from the reference implementation. A compiler that
is there and fails is an error.
"""

import os
import platform
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError as error:
    raise SystemExit(
        f"tnt_kernels is built against PyTorch, which cannot be imported here ({error}).\n"
        "Install it first, then build without isolation:\n"
        "    pip install 'torch>=2.11' setuptools wheel ninja\n"
        "    pip install --no-build-isolation -e ."
    ) from None

ROOT = Path(__file__).parent
SOURCES = ["csrc/bindings.cpp", *(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cpu/*.cpp"))]


def why_no_extension() -> str | None:
    """Says what stands in the way of the extension, None where nothing does."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the C++ kernels are for x86-64 Linux, this is {sys.platform} {platform.machine()}"
    compiler = os.environ.get("CXX", "c++")
    if len(shlex.split(compiler)) != 1:
        raise SystemExit(
            f"CXX must name one program, as PyTorch's builds want it, got {compiler!r}"
        )
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not on the PATH (set CXX to name another)"
    return None


def blas() -> dict[str, Any]:
    """The Extension() arguments for the BLAS."""
    library = os.environ.get("TNT_BLAS_LIBRARY")
    if library:
        path = Path(library).resolve()
        if not path.is_file():
            raise SystemExit(f"TNT_BLAS_LIBRARY must be the path of a library, got {library!r}")
        macros = [("TNT_BLAS_PREFIX", os.environ.get("TNT_BLAS_PREFIX", ""))]
        if os.environ.get("TNT_BLAS_SET_THREADS"):
            macros.append(("TNT_BLAS_SET_THREADS", os.environ["TNT_BLAS_SET_THREADS"]))
        return {
            "define_macros": macros,
            "extra_objects": [str(path)],
            "runtime_library_dirs": [str(path.parent)],
        }
    try:
        import scipy_openblas32 as openblas
    except ImportError as error:
        raise SystemExit(
            f"tnt_kernels is built on OpenBLAS, which is not here ({error}). Install it with\n"
            "    pip install scipy-openblas32\n"
            "or set TNT_BLAS_LIBRARY to another BLAS's path (see setup.py)."
        ) from None
    folder = Path(openblas.get_lib_dir())
    return {
        "libraries": [openblas.get_library()],
        "library_dirs": [str(folder)],
        # Beside the installed package, and where it is now, for an editable install.
        "runtime_library_dirs": [f"$ORIGIN/../{openblas.__name__}/{folder.name}", str(folder)],
    }


class Build(BuildExtension):  # type: ignore[misc]
    """BuildExtension that keeps its object files, so that a second build compiles what changed."""

    def finalize_options(self) -> None:
        """Puts the object files where the next build finds them."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / "extension")


def extension() -> dict[str, Any]:
    """The setup() arguments for the extension; empty where it cannot be built."""
    reason = why_no_extension()
    if reason is not None:
        print(
            f"tnt_kernels: installing without the C++ extension: {reason}. "
            "The reference implementation will serve; the results are the same.",
            file=sys.stderr,
        )
        return {}
    module = CppExtension(
        "tnt_kernels._C",
        SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        depends=["setup.py"]
        + [str(header.relative_to(ROOT)) for header in ROOT.glob("csrc/**/*.h")],
        extra_compile_args=[
            *("-O3", "-fopenmp", "-std=c++20", "-Wall", "-Wextra"),
            # Once more as system headers: PyTorch's own are not free of warnings.
            *(f"-isystem{path}" for path in include_paths()),
        ],
        extra_link_args=["-fopenmp"],
        **blas(),
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}}


setup(
    packages=["tnt_kernels", "tnt_optim"],
    package_dir={"tnt_kernels": "tnt_kernels", "tnt_optim": "python/tnt_optim"},
    package_data={"tnt_kernels": ["py.typed"], "tnt_optim": ["py.typed"]},
    **extension(),
)
