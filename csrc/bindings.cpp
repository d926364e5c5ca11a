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

pybind11::dict build_info() {
  pybind11::dict info;
#if defined(_OPENMP)
  info["extension"] = "built for torch " TORCH_VERSION ", OpenMP";
#else
  info["extension"] = "built for torch " TORCH_VERSION ", without OpenMP: serial";
#endif
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "g++ " __VERSION__;
#endif
#ifdef TNT_WITHOUT_CPU
  info["blas"] = "none";
#else
  info["blas"] = tnt::blas::name();
#endif
#ifdef TNT_CUDA_ARCHITECTURES
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." +
                 std::to_string(CUDART_VERSION / 10 % 100) +
                 " for " TNT_TEXT(TNT_CUDA_ARCHITECTURES);
#else
  info["cuda"] = "none";
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ operators of tnt_kernels; importing it registers them.";
  module.def("build_info", build_info,
             "How this extension was built: PyTorch, compiler, BLAS, CUDA.");
}
