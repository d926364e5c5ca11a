// Tensors as the kernels see them: address, element type, sizes and strides.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace tnt {

enum class Element { kFloat, kDouble, kBFloat16, kHalf };

// The most dimensions of a tensor, as in PyTorch's own loops; check.h refuses more.
constexpr size_t kMostDimensions = 64;

// A value for each dimension of a tensor, without allocated memory.
template <typename T>
class PerDimension {
 public:
  PerDimension() = default;
  explicit PerDimension(size_t size) : size_(size) {}
  PerDimension(const PerDimension& other) : size_(other.size_) {
    std::copy_n(other.values_, size_, values_);
  }
  PerDimension& operator=(const PerDimension& other) {
    size_ = other.size_;
    std::copy_n(other.values_, size_, values_);
    return *this;
  }

  void push_back(const T& value) { values_[size_++] = value; }
  void pop_back() { --size_; }
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T* begin() { return values_; }
  T* end() { return values_ + size_; }
  const T* begin() const { return values_; }
  const T* end() const { return values_ + size_; }
  T* data() { return values_; }
  const T* data() const { return values_; }
  T& back() { return values_[size_ - 1]; }
  const T& back() const { return values_[size_ - 1]; }
  T& operator[](size_t i) { return values_[i]; }
  const T& operator[](size_t i) const { return values_[i]; }

 private:
  T values_[kMostDimensions];
  size_t size_ = 0;
};

using Strides = PerDimension<int64_t>;

// Sizes and strides (in elements) point into the tensor.
struct TensorView {
  const void* data;
  Element element;
  int64_t order;
  const int64_t* sizes;
  const int64_t* strides;

  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < order; ++i) product *= sizes[i];
    return product;
  }

  bool contiguous() const {
    int64_t expected = 1;
    for (int64_t i = order - 1; i >= 0; --i) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }
};

// The memory of a tensor that the kernel writes.
inline void* writable(const TensorView& view) { return const_cast<void*>(view.data); }

// Stored in sixteen bits, computed in float.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <typename To, typename From>
  requires(std::is_arithmetic_v<From>)
To convert(From value) {
  return static_cast<To>(value);
}

template <typename To>
To convert(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <typename To>
To convert(Half value) {
  // The exponent's bias grows from 15 to 127; subnormal numbers count units of 2^-24.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  float result;
  if (magnitude < 0x0400) {
    result = static_cast<float>(magnitude) * 0x1p-24f;
  } else {
    // 224: the exponent of infinity and NaN becomes 255.
    result = std::bit_cast<float>((magnitude << 13) + ((magnitude >= 0x7c00 ? 224u : 112u) << 23));
  }
  return sign ? -result : result;
}

inline BFloat16 round_half(float value, BFloat16) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline Half round_half(float value, Half) {
  auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  const auto with_sign = [&](uint32_t magnitude) {
    return Half{static_cast<uint16_t>(sign | magnitude)};
  };
  if (bits > 0x7f800000) return with_sign(0x7e00);   // NaN
  if (bits >= 0x477ff000) return with_sign(0x7c00);  // 65520 and above round to infinity
  if (bits < 0x38800000) {                           // below 2^-14: in units of 2^-24
    // Adding 0.5, whose last place is 2^-24, rounds to that unit.
    return with_sign(std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000);
  }
  return with_sign((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

// The nearest number of the type, ties to even.
template <typename To, typename From>
To round_to(From value) {
  if constexpr (std::is_arithmetic_v<To>) {
    return static_cast<To>(value);
  } else {
    return round_half(static_cast<float>(value), To{});
  }
}

// Calls f with a null pointer to the C++ type of `element`.
template <typename F>
void with_element(Element element, const F& f) {
  switch (element) {
    case Element::kFloat:
      return f(static_cast<const float*>(nullptr));
    case Element::kDouble:
      return f(static_cast<const double*>(nullptr));
    case Element::kBFloat16:
      return f(static_cast<const BFloat16*>(nullptr));
    case Element::kHalf:
      return f(static_cast<const Half*>(nullptr));
  }
}

// Calls f with a zero of the state type: double for double tensors, else float.
template <typename F>
auto with_state(Element element, const F& f) {
  return element == Element::kDouble ? f(double{}) : f(float{});
}

template <typename T>
concept ElementType = std::is_same_v<T, float> || std::is_same_v<T, double> ||
                      std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

template <ElementType T>
constexpr Element kElement = std::is_same_v<T, double>     ? Element::kDouble
                             : std::is_same_v<T, BFloat16> ? Element::kBFloat16
                             : std::is_same_v<T, Half>     ? Element::kHalf
                                                           : Element::kFloat;

}  // namespace tnt
