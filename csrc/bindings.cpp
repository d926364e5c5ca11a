// How this extension was built, and the registration of its kernels.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <string>

#include "lists.h"
#ifndef TNT_WITHOUT_CPU
#include "cpu/blas.h"
#endif
#ifdef TNT_CUDA_ARCHITECTURES
#include <cuda_runtime_api.h>
#endif

namespace tnt {
void register_cpu_kernels();
namespace cuda {
void register_cuda_kernels();
}
}  // namespace tnt

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
  info["blas"] = tnt::blas::description();
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

// "major.minor" of a version: PyTorch's C++ interface may change with it.
std::string series(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

void register_kernels(const std::string& torch_version) {
  if (series(torch_version) != series(TORCH_VERSION)) {
    throw pybind11::import_error("it was built for torch " TORCH_VERSION ", this is torch " +
                                 torch_version);
  }
#ifndef TNT_WITHOUT_CPU
  tnt::register_cpu_kernels();
#endif
#ifdef TNT_CUDA_ARCHITECTURES
  tnt::cuda::register_cuda_kernels();
#endif
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ operators of tnt_kernels.";
  module.def(
      "register_kernels",
      [module](const std::string& torch_version) {
        register_kernels(torch_version);
        tnt::define_lists(module);
      },
      "Registers the operators and defines the functions of tnt_kernels/lists.py, if the version "
      "of the PyTorch that runs is the one that this extension was built for; otherwise an "
      "ImportError, and nothing of PyTorch is touched.");
  module.def("build_info", build_info,
             "How this extension was built: PyTorch, compiler, BLAS, CUDA.");
}
