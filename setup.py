"""Builds two packages, ``tnt_kernels`` and ``tnt_optim``, and one extension, ``tnt_kernels._C``.

    pip install --no-build-isolation -e .

PyTorch must already be installed, because the extension is built against it; build isolation would
hide it. If the extension cannot be built (no C++ compiler, or not x86-64 Linux), the packages are
installed without it and use the reference implementation. A compiler that fails is an error.

Environment variables:

    TNT_CUDA=1        also build the CUDA kernels; needs nvcc and a CUDA build of PyTorch, no GPU.
                      TORCH_CUDA_ARCH_LIST selects the GPUs, by default CUDA_ARCHITECTURES.
    TNT_CPU=0         do not build the CPU kernels. TNT_CUDA=1 without a BLAS skips them too, with
                      a message; TNT_CPU=1 makes the missing BLAS an error.
    TNT_BLAS_LIBRARY  the path of the shared library of another BLAS (with LAPACK) than
                      scipy-openblas32's
    TNT_BLAS_PREFIX   the prefix of its Fortran names
    TNT_BLAS_SET_THREADS  its C function that sets the number of threads, if any
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
    import torch
    from torch.utils.cpp_extension import (
        CUDA_HOME,
        BuildExtension,
        CppExtension,
        CUDAExtension,
        include_paths,
    )
except ImportError as error:
    raise SystemExit(
        f"tnt_kernels is built against PyTorch, which cannot be imported ({error}).\n"
        "Install it first, then build without isolation:\n"
        "    pip install 'torch>=2.11' 'setuptools>=77' wheel ninja\n"
        "    pip install --no-build-isolation -e ."
    ) from None

ROOT = Path(__file__).parent

# A100 and H100, and PTX for later GPUs.
CUDA_ARCHITECTURES = "8.0;9.0+PTX"


def sources(*patterns: str) -> list[str]:
    """The files that match, relative to this folder."""
    return [str(p.relative_to(ROOT)) for pattern in patterns for p in sorted(ROOT.glob(pattern))]


def switch(name: str) -> bool | None:
    """The value of an environment variable that is 0, 1 or not set."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, got {value!r}")
    return value == "1" if value else None


def why_no_extension() -> str | None:
    """Why the extension cannot be built; None if it can."""
    if switch("TNT_CPU") is False and not switch("TNT_CUDA"):
        return "TNT_CPU=0 leaves out the CPU kernels, and TNT_CUDA=1 is not set"
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


def blas() -> dict[str, Any] | None:
    """The Extension() arguments for the BLAS; None to build without the CPU kernels."""
    if switch("TNT_CPU") is False:
        return None
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
        if switch("TNT_CUDA") and switch("TNT_CPU") is None:
            print(
                "tnt_kernels: building the CUDA kernels only: the CPU kernels need OpenBLAS, which "
                f"is not here ({error}; pip install scipy-openblas32, or set TNT_BLAS_LIBRARY). "
                "On CPU tensors the reference implementation will serve; the results are the same.",
                file=sys.stderr,
            )
            return None
        raise SystemExit(
            f"tnt_kernels is built on OpenBLAS, which is not here ({error}). Install it with\n"
            "    pip install scipy-openblas32\n"
            "or set TNT_BLAS_LIBRARY to another BLAS's path (see setup.py)."
        ) from None
    folder = Path(openblas.get_lib_dir())
    return {
        "libraries": [openblas.get_library()],
        "library_dirs": [str(folder)],
        # Next to the installed package, and its path now, for an editable install.
        "runtime_library_dirs": [f"$ORIGIN/../{openblas.__name__}/{folder.name}", str(folder)],
    }


def check_cuda() -> None:
    """Refuses TNT_CUDA=1 if the CUDA kernels cannot be built."""
    if torch.version.cuda is None:
        raise SystemExit(
            f"TNT_CUDA=1 needs a CUDA build of PyTorch, this is {torch.__version__}. Install one, "
            "or unset TNT_CUDA to build the CPU kernels only."
        )
    if CUDA_HOME is None or shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin")) is None:
        raise SystemExit(
            "TNT_CUDA=1 needs a CUDA toolkit: set CUDA_HOME to the folder that contains bin/nvcc "
            f"(now: {CUDA_HOME!r})"
        )


class Build(BuildExtension):  # type: ignore[misc]
    """BuildExtension that keeps its object files: a second build compiles only changed files."""

    def finalize_options(self) -> None:
        """Sets a folder for object files that the next build finds."""
        super().finalize_options()
        kind = "extension-cuda" if switch("TNT_CUDA") else "extension"
        self.build_temp = str(ROOT / "build" / kind)


def extension() -> dict[str, Any]:
    """The setup() arguments for the extension; empty if it cannot be built."""
    reason = why_no_extension()
    if reason is not None:
        print(
            f"tnt_kernels: installing without the C++ extension: {reason}. "
            "The reference implementation will serve; the results are the same.",
            file=sys.stderr,
        )
        return {}
    cuda = bool(switch("TNT_CUDA"))
    if cuda:
        check_cuda()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    library = blas()
    files = ["csrc/bindings.cpp", "csrc/lists.cpp"]
    arguments = dict(library or {})
    macros = arguments.pop("define_macros", [])
    if library is None:
        macros.append(("TNT_WITHOUT_CPU", None))
    else:
        files += sources("csrc/cpu/*.cpp")
    if cuda:
        files += sources("csrc/cuda/*.cpp", "csrc/cuda/*.cu")
        architectures = os.environ["TORCH_CUDA_ARCH_LIST"].replace(";", " ")
        macros.append(("TNT_CUDA_ARCHITECTURES", architectures))
    common = ["-O3", "-std=c++20"]
    module = (CUDAExtension if cuda else CppExtension)(
        "tnt_kernels._C",
        files,
        include_dirs=[str(ROOT / "csrc")],
        depends=["setup.py", *sources("csrc/**/*.h", "csrc/**/*.cuh")],
        define_macros=macros,
        extra_compile_args={
            "cxx": [
                # Without errno, which nothing here reads, square roots are vectorised. Without
                # contraction, every CPU computes the same bits.
                *(*common, "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra"),
                # A small file, of which Python sees the module alone.
                *("-g0", "-fvisibility=hidden"),
                # Again as system headers: PyTorch's headers cause warnings.
                *(f"-isystem{path}" for path in include_paths("cuda" if cuda else "cpu")),
            ],
            "nvcc": [*common, "-Xcompiler", "-Wall,-Wextra,-fvisibility=hidden"],
        },
        extra_link_args=["-fopenmp", "-Wl,--strip-all"],
        **arguments,
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}}


setup(
    license="MIT",
    packages=[
        "tnt_kernels",
        "tnt_kernels.triton",
        "tnt_optim",
        "tnt_optim.distributed",
        "tnt_optim.kfac",
    ],
    package_dir={"tnt_kernels": "tnt_kernels", "tnt_optim": "python/tnt_optim"},
    package_data={"tnt_kernels": ["py.typed"], "tnt_optim": ["py.typed"]},
    **extension(),
)
