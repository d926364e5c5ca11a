// How this extension was built, and the registration of its kernels.

#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <string>

#include "cpu/blas.h"
#include "lists.h"

namespace tnt {
void register_cpu_kernels();
}

namespace {

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
  info["blas"] = tnt::blas::description();
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
  tnt::register_cpu_kernels();
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
  module.def("build_info", build_info, "How this extension was built: PyTorch, compiler, BLAS.");
}
