// The operators' arguments and results, through PyTorch's stable C interface.
//
// The operators use nothing else of PyTorch, so one build works with every PyTorch
// from TORCH_TARGET_VERSION (setup.py) on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tnt {

// PyTorch's C functions print what went wrong and return only that something did.
inline void succeeded(AOTITorchError code) {
  if (code != TORCH_SUCCESS) throw std::runtime_error("a call of PyTorch failed, see above");
}

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};
using TensorOwner = std::unique_ptr<AtenTensorOpaque, Destroy<aoti_torch_delete_tensor_object>>;
using ListOwner = std::unique_ptr<StableListOpaque, Destroy<torch_delete_list>>;

struct Dtype {
  int32_t number;

  bool operator==(const Dtype&) const = default;
  friend std::ostream& operator<<(std::ostream& out, Dtype dtype) {
    return out << torch::headeronly::toString(
               static_cast<torch::headeronly::ScalarType>(dtype.number));
  }
};
inline const Dtype kFloat{aoti_torch_dtype_float32()}, kDouble{aoti_torch_dtype_float64()};
inline const Dtype kBFloat16{aoti_torch_dtype_bfloat16()}, kHalf{aoti_torch_dtype_float16()};
inline const Dtype kInt{aoti_torch_dtype_int32()};

// Sizes or strides.
struct Numbers : std::span<const int64_t> {
  using span::span;

  friend bool operator==(const Numbers& a, const Numbers& b) { return std::ranges::equal(a, b); }
  friend std::ostream& operator<<(std::ostream& out, const Numbers& numbers) {
    out << '[';
    for (size_t i = 0; i < numbers.size(); ++i) out << (i ? ", " : "") << numbers[i];
    return out << ']';
  }
};

// Owns a tensor's handle. Its properties are read once: each is a call.
class Tensor {
 public:
  // If a property cannot be read, the tensor counts as not dense, and is refused.
  explicit Tensor(AtenTensorHandle handle) noexcept : handle_(handle) {
    static const int32_t strided = aoti_torch_layout_strided(), cpu = aoti_torch_device_type_cpu();
    int32_t layout = 0, device = 0;
    int64_t order = 0, *sizes = nullptr, *strides = nullptr;
    if (aoti_torch_get_layout(handle, &layout) || layout != strided ||
        aoti_torch_get_device_type(handle, &device) || device != cpu ||
        aoti_torch_get_dtype(handle, &dtype_.number) || aoti_torch_get_dim(handle, &order) ||
        aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides)) {
      return;
    }
    dense_ = true;
    const auto count = static_cast<size_t>(order);
    sizes_ = {sizes, count};
    strides_ = {strides, count};
    for (size_t i = count; i-- > 0; numel_ *= sizes[i]) {
      contiguous_ = contiguous_ && (sizes[i] == 1 || strides[i] == numel_);
    }
    contiguous_ = contiguous_ || numel_ == 0;
  }

  bool is_dense_on_cpu() const { return dense_; }
  bool is_contiguous() const { return contiguous_; }
  Dtype dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t i) const { return sizes_[static_cast<size_t>(i)]; }
  int64_t stride(int64_t i) const { return strides_[static_cast<size_t>(i)]; }
  Numbers sizes() const { return sizes_; }
  Numbers strides() const { return strides_; }
  int64_t element_size() const {
    return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_.number));
  }
  size_t nbytes() const { return static_cast<size_t>(numel_ * element_size()); }

  // Addresses are read at every call: mutable_data() gives a lazy copy its own memory.
  const void* data() const {
    const void* data = nullptr;
    succeeded(torch_get_const_data_ptr(handle_.get(), &data));
    return data;
  }
  void* mutable_data() const {
    void* data = nullptr;
    succeeded(torch_get_mutable_data_ptr(handle_.get(), &data));
    return data;
  }

  AtenTensorHandle release() { return handle_.release(); }

 private:
  TensorOwner handle_;
  Numbers sizes_, strides_;
  Dtype dtype_{};
  int64_t numel_ = 1;
  bool dense_ = false, contiguous_ = true;
};

using TensorList = std::vector<Tensor>;

// A new contiguous tensor on the CPU, uninitialised.
inline Tensor empty(Numbers sizes, Dtype dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) {
    strides[i] = stride;
  }
  AtenTensorHandle handle = nullptr;
  succeeded(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), dtype.number, aoti_torch_device_type_cpu(), 0,
                                     &handle));
  return Tensor(handle);
}

// take and put convert an argument from PyTorch's stack and a result to it; name is the type's name
// in a schema.
template <typename T>
struct Convert {
  static T take(StableIValue value) { return torch::stable::detail::to<T>(value); }
  static std::string name() {
    return std::is_same_v<T, bool> ? "bool" : std::is_same_v<T, double> ? "float" : "int";
  }
};

template <>
struct Convert<Tensor> {
  // The same as to<AtenTensorHandle>, without its check of PyTorch's version at every call.
  static Tensor take(StableIValue value) { return Tensor(std::bit_cast<AtenTensorHandle>(value)); }
  static StableIValue put(Tensor tensor) { return torch::stable::detail::from(tensor.release()); }
  static std::string name() { return "Tensor"; }
};

template <typename T>
struct Convert<std::vector<T>> {
  static std::vector<T> take(StableIValue value) {
    const ListOwner list(torch::stable::detail::to<StableListHandle>(value));
    size_t size = 0;
    succeeded(torch_list_size(list.get(), &size));
    std::vector<T> result;
    result.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      succeeded(torch_list_get_item(list.get(), i, &item));
      result.push_back(Convert<T>::take(item));
    }
    return result;
  }
  static StableIValue put(std::vector<T> values) {
    StableListHandle handle = nullptr;
    succeeded(torch_new_list_reserve_size(values.size(), &handle));
    ListOwner list(handle);
    for (T& value : values) {
      succeeded(torch_list_push_back(handle, Convert<T>::put(std::move(value))));
    }
    return torch::stable::detail::from(list.release());
  }
  static std::string name() { return Convert<T>::name() + "[]"; }
};

template <>
struct Convert<void> {
  static std::string name() { return "()"; }
};

// A function as PyTorch calls it. Exceptions pass through PyTorch to Python, where
// std::invalid_argument is a ValueError and std::bad_alloc a MemoryError; since PyTorch 2.15 every
// exception is a RuntimeError.
template <auto function>
struct Boxed;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Boxed<function> {
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    const auto result = [&]<size_t... i>(std::index_sequence<i...>) {
      std::tuple arguments{Convert<std::remove_cvref_t<Arguments>>::take(stack[i])...};
      return std::apply(function, arguments);
    };
    constexpr auto indices = std::index_sequence_for<Arguments...>();
    if constexpr (std::is_void_v<Result>) {
      result(indices);
    } else {
      stack[0] = Convert<Result>::put(result(indices));
    }
  }

  // The types as in a schema. Python compares them with the schema, because PyTorch cannot.
  static std::string signature() {
    std::string types;
    for (const std::string& name : {Convert<std::remove_cvref_t<Arguments>>::name()...}) {
      types += (types.empty() ? "" : ", ") + name;
    }
    return "(" + types + ") -> " + Convert<Result>::name();
  }
};

}  // namespace tnt
