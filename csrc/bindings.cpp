// What is no operator: how this extension was built.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <string>

#include "cpu/blas.h"

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

std::string extension() {
  std::string text = "built for torch " TORCH_VERSION;
#if defined(_OPENMP)
  text += ", OpenMP";
#else
  text += ", without OpenMP: serial";
#endif
  return text;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ operators of tnt_kernels; importing it registers them.";
  module.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["extension"] = extension();
        info["compiler"] = compiler();
        info["blas"] = tnt::blas::name();
        info["cuda"] = "none";
        return info;
      },
      "How this extension was built: PyTorch, compiler, BLAS, CUDA.");
}
