// The module tnt_kernels._host: host work on lists of tensors, as in tnt_kernels/lists.py.
//
// Unlike the operators it fits only the PyTorch it was built for: the stable interface is too slow.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tnt {
namespace {

namespace py = pybind11;

// Calls use(tensor) for each tensor of a Python sequence, which keeps them alive: copies of tensors
// would count references, atomically, for each tensor of each call.
template <typename Use>
void for_each(py::handle sequence, Use use) {
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "tensors must be a list"));
  if (!items) throw py::error_already_set();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    if (!THPVariable_Check(item)) throw py::type_error("tensors must be a list of tensors");
    use(THPVariable_Unpack(item));
  }
}

// The same as data_ptr() in Python, which gives a lazy copy its own memory first.
uint64_t address(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
}

py::bytes to_bytes(const std::vector<uint64_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t)};
}

py::bytes layouts_key(py::handle tensors, uint64_t alignment) {
  std::vector<uint64_t> words;
  for_each(tensors, [&](const at::Tensor& tensor) {
    const bool aligned = address(tensor) % alignment == 0;
    const at::Device device = tensor.device();
    // The number of dimensions comes first, so that no two lists have the same words.
    words.push_back(static_cast<uint64_t>(tensor.dim()) << 32 |
                    static_cast<uint64_t>(static_cast<uint8_t>(tensor.scalar_type())) << 24 |
                    static_cast<uint64_t>(static_cast<uint8_t>(device.type())) << 16 |
                    static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 8 |
                    static_cast<uint64_t>(tensor.is_neg()) << 1 | static_cast<uint64_t>(aligned));
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
    words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
  });
  return to_bytes(words);
}

py::bytes addresses(py::handle tensors) {
  std::vector<uint64_t> words;
  for_each(tensors, [&](const at::Tensor& tensor) { words.push_back(address(tensor)); });
  return to_bytes(words);
}

bool are_contiguous(py::handle tensors) {
  bool all = true;
  for_each(tensors, [&](const at::Tensor& tensor) { all = all && tensor.is_contiguous(); });
  return all;
}

void mark_written(py::handle tensors) {
  for_each(tensors, [](const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  });
}

// "major.minor" of a version: PyTorch's C++ interface may change between these.
std::string series(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

void define(py::module_ module, const std::string& torch_version) {
  if (series(torch_version) != series(TORCH_VERSION)) {
    throw py::import_error("it was built for torch " TORCH_VERSION ", this is torch " +
                           torch_version);
  }
  module.def("layouts_key", torch::wrap_pybind_function(layouts_key));
  module.def("addresses", torch::wrap_pybind_function(addresses));
  module.def("are_contiguous", torch::wrap_pybind_function(are_contiguous));
  module.def("mark_written", torch::wrap_pybind_function(mark_written));
}

}  // namespace
}  // namespace tnt

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The functions of tnt_kernels/lists.py in C++.";
  module.def(
      "define", [module](const std::string& version) { tnt::define(module, version); },
      "Defines the functions, if this version of PyTorch is the one that they were built for; "
      "otherwise an ImportError, and nothing of PyTorch is touched.");
}
