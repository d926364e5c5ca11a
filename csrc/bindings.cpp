// build_info(): how this extension was built.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <string>

#ifndef TNT_WITHOUT_CPU
#include "cpu/blas.h"
#endif
#ifdef TNT_CUDA_ARCHITECTURES
#include <cuda_runtime_api.h>
#endif

namespace {

// A macro's value as a string.
#define TNT_QUOTED(text) #text
#define TNT_TEXT(macro) TNT_QUOTED(macro)

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

std::string blas() {
#ifdef TNT_WITHOUT_CPU
  return "none";
#else
  return tnt::blas::name();
#endif
}

std::string cuda() {
#ifdef TNT_CUDA_ARCHITECTURES
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION / 10 % 100) +
         " for " TNT_TEXT(TNT_CUDA_ARCHITECTURES);
#else
  return "none";
#endif
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
        info["blas"] = blas();
        info["cuda"] = cuda();
        return info;
      },
      "How this extension was built: PyTorch, compiler, BLAS, CUDA.");
}
