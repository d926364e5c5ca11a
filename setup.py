"""Builds two packages, ``tnt_kernels`` and ``tnt_optim``, and two extensions.

    pip install .

``tnt_kernels._ops``, the operators, works with PyTorch 2.11 and all later ones.
``tnt_kernels._host`` makes calls on a GPU faster, and only with the PyTorch it is built with.

PyTorch must already be installed, because both are built with its headers; it is found under build
isolation too, so none is fetched. If the extensions cannot be built (no C++ compiler, or not x86-64
Linux), the packages are installed without them and use the reference implementation. A compiler
that fails is an error.

Environment variables:

    TNT_CPU=0         install without the extensions
    TNT_BLAS_LIBRARY  the path of the shared library of another BLAS (with LAPACK) than
                      scipy-openblas32's
    TNT_BLAS_PREFIX   the prefix of its Fortran names
    TNT_BLAS_SET_THREADS  its C function that sets the number of threads, if any
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command import editable_wheel

ROOT = Path(__file__).parent
FOLDERS = {"tnt_kernels": "tnt_kernels", "tnt_optim": "python/tnt_optim"}
# Where the environment's packages are, under build isolation too.
PACKAGES = Path(sysconfig.get_path("purelib"))
# They read what stands here, or pack the sources.
WITHOUT_PYTORCH = {"sdist", "egg_info", "dist_info"}
IN_PLACE = {"--inplace", "editable_wheel"}


def cpp_extension() -> Any:
    """``torch.utils.cpp_extension`` of the environment's PyTorch, which build isolation hides."""
    sys.path.append(str(PACKAGES))
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(
            f"tnt_kernels is built with PyTorch's headers, and PyTorch cannot be imported ({error})"
            ".\nInstall it in this environment first:\n"
            "    pip install 'torch>=2.11'\n"
            "    pip install .\n"
            "A tool that builds in an environment of its own does not see it: pip install "
            "'setuptools>=77' wheel ninja scipy-openblas32, then add --no-build-isolation (uv) or "
            "--no-isolation (build)."
        ) from None
    return cpp_extension


def sources(*patterns: str) -> list[str]:
    """The files that match, relative to this folder."""
    return [str(p.relative_to(ROOT)) for pattern in patterns for p in sorted(ROOT.glob(pattern))]


def why_no_extension() -> str | None:
    """Why the extension cannot be built; None if it can."""
    wanted = os.environ.get("TNT_CPU", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"TNT_CPU must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return "TNT_CPU=0 leaves it out"
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


def check_compiler() -> None:
    """Build a module of one line, so that a compiler that cannot ends with a line, too."""
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "trial.cpp")
        source.write_text("#include <Python.h>\n#include <concepts>\n", encoding="utf-8")
        command = [compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", f"{folder}/trial"]
        command.append(f"-I{sysconfig.get_path('include')}")
        try:
            tried = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            said = [str(error)]
        else:
            if tried.returncode == 0:
                return
            said = (tried.stderr + tried.stdout).splitlines() or ["it says nothing"]
    why = next((line for line in said if "error" in line), said[0]).replace(f"{folder}/", "")
    raise SystemExit(
        f"the C++ compiler {compiler!r} cannot build Python modules in C++20: {why}. Install "
        "GCC 12 or later and Python's headers, or name a compiler with CXX; TNT_CPU=0 leaves the "
        "C++ kernels out."
    )


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
    inside = Path(openblas.__name__, folder.name)
    return {
        "libraries": [openblas.get_library()],
        "library_dirs": [str(folder)],
        # Next to the installed package; for a build in place, where the packages are.
        "runtime_library_dirs": [
            f"$ORIGIN/../{inside}",
            *([str(PACKAGES / inside)] if IN_PLACE & set(sys.argv) else []),
        ],
    }


def extension() -> dict[str, Any]:
    """The setup() arguments for the extensions; empty if they cannot be built."""
    if WITHOUT_PYTORCH & set(sys.argv):
        return {}
    reason = why_no_extension()
    if reason is not None:
        print(
            f"tnt_kernels: installing without the C++ extension: {reason}. "
            "The operators will use their reference implementation, in plain PyTorch.",
            file=sys.stderr,
        )
        return {}
    torch = cpp_extension()

    class Build(torch.BuildExtension):  # type: ignore[misc, name-defined]
        """It keeps its object files: a second build compiles only changed files."""

        def finalize_options(self) -> None:
            """Sets a folder for object files that the next build finds."""
            super().finalize_options()
            self.build_temp = str(ROOT / "build" / "extension")

        def build_extensions(self) -> None:
            """Compiles, and says before what takes long and after what failed."""
            check_compiler()
            if not Path(self.build_temp).exists():
                print("Compiling the C++ kernels: one to two minutes.", file=sys.stderr)
            try:
                super().build_extensions()
            except RuntimeError as error:
                raise SystemExit(f"{error}: the compiler's messages are above") from None

    settings: dict[str, Any] = {
        "include_dirs": [str(ROOT / "csrc")],
        "depends": ["setup.py", *sources("csrc/**/*.h")],
        # A small file, of which Python sees the module alone. What this PyTorch lacks is an
        # ImportError, not an error of the first call.
        "extra_link_args": ["-Wl,--strip-all,-z,now"],
    }
    flags = [
        *("-O3", "-std=c++20", "-Wall", "-Wextra", "-g0", "-fvisibility=hidden"),
        # Again as system headers: PyTorch's headers cause warnings.
        *(f"-isystem{path}" for path in torch.include_paths()),
    ]
    operators = torch.CppExtension(
        "tnt_kernels._ops",
        ["csrc/bindings.cpp", *sources("csrc/cpu/*.cpp")],
        py_limited_api=True,
        extra_compile_args=[
            *flags,
            # Without errno, which nothing here reads, square roots are vectorised. Without
            # contraction, every CPU computes the same bits.
            *("-fno-math-errno", "-ffp-contract=off"),
            # Only what PyTorch 2.11 has, and only what later ones keep.
            *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY"),
        ],
        **settings,
        **blas(),
    )
    host = torch.CppExtension(
        "tnt_kernels._host", ["csrc/lists.cpp"], extra_compile_args=flags, **settings
    )
    return {"ext_modules": [operators, host], "cmdclass": {"build_ext": Build}}


class Editable(editable_wheel.editable_wheel):
    """Installs a path, to a folder with links to both packages.

    What setuptools installs for two folders is asked after all paths: beside a clone, Python would
    take the clone itself, which is named as a package, for the package.
    """

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        links = ROOT / ".editable"
        try:
            links.mkdir(exist_ok=True)
            for package, folder in FOLDERS.items():
                if not (links / package).exists():
                    (links / package).symlink_to(Path("..", folder), target_is_directory=True)
            if not self.mode:
                return editable_wheel._StaticPth(self.distribution, name, [links])
        except (AttributeError, OSError):  # another setuptools; no links on this system
            pass
        return super()._select_strategy(name, tag, build_lib)


extensions = extension()
commands = extensions.pop("cmdclass", {})
setup(
    license="MIT",
    packages=[
        "tnt_kernels",
        "tnt_kernels.benchmark",
        "tnt_kernels.operators",
        "tnt_kernels.triton",
        "tnt_optim",
        "tnt_optim.distributed",
        "tnt_optim.kfac",
    ],
    package_dir=FOLDERS,
    package_data={"tnt_kernels": ["py.typed"], "tnt_optim": ["py.typed"]},
    cmdclass={"editable_wheel": Editable, **commands},
    **extensions,
)
