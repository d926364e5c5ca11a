// The module tnt_kernels._host: host work on lists of tensors, as in tnt_kernels/lists.py.
//
// Unlike the operators it fits only the PyTorch it was built for: the stable interface is too slow.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
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

// The address after the last byte of a tensor.
uint64_t end(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return address(tensor);
  int64_t reach = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) reach += (tensor.size(i) - 1) * tensor.stride(i);
  return address(tensor) + static_cast<uint64_t>(reach) * tensor.element_size();
}

py::bytes to_bytes(const std::vector<uint64_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t)};
}

py::tuple walk(py::handle tensors) {
  std::vector<uint64_t> words, addresses, ends;
  bool contiguous = true, plain = true;
  for_each(tensors, [&](const at::Tensor& tensor) {
    addresses.push_back(address(tensor));
    ends.push_back(end(tensor));
    contiguous = contiguous && tensor.is_contiguous();
    plain = plain && !tensor.is_neg() && !tensor._is_zerotensor() &&
            !tensor.key_set().has(c10::DispatchKey::Python);
    const bool aligned = addresses.back() % 16 == 0;
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
  return py::make_tuple(to_bytes(words), to_bytes(addresses), to_bytes(ends), contiguous, plain);
}

struct Span {
  uint64_t start, end;
  bool written;
};

// The spans of a list's tensors, from the bytes of their addresses and ends.
void append(std::vector<Span>& spans, py::handle addresses, py::handle ends, bool written) {
  const std::string_view starts = py::cast<std::string_view>(addresses);
  const std::string_view stops = py::cast<std::string_view>(ends);
  for (size_t at = 0; at < starts.size(); at += sizeof(uint64_t)) {
    Span span{0, 0, written};
    std::memcpy(&span.start, starts.data() + at, sizeof(uint64_t));
    std::memcpy(&span.end, stops.data() + at, sizeof(uint64_t));
    if (span.start < span.end) spans.push_back(span);
  }
}

bool are_apart(const std::vector<py::tuple>& written, const std::vector<py::tuple>& read) {
  std::vector<Span> spans;
  for (const py::tuple& list : written) append(spans, list[0], list[1], true);
  for (const py::tuple& list : read) append(spans, list[0], list[1], false);
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.start < b.start; });
  uint64_t reached = 0, written_to = 0;  // by all spans before, and by those that are written
  for (const Span& span : spans) {
    if (span.start < (span.written ? reached : written_to)) return false;
    reached = std::max(reached, span.end);
    if (span.written) written_to = std::max(written_to, span.end);
  }
  return true;
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
  module.def("walk", torch::wrap_pybind_function(walk));
  module.def("are_apart", torch::wrap_pybind_function(are_apart));
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
