// Tensors for the tests: any element type, any strides, memory of the exact size on the heap, so
// that the address sanitizer sees the first element too many, and NaN in every gap, so that a
// result shows a read outside of an element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpu/views.h"
#include "numbers.h"

using Shape = std::vector<int64_t>;

inline int64_t count_of(const Shape& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

inline std::string name_of(const Shape& sizes) {
  std::string name = "(";
  for (const int64_t size : sizes) name += std::to_string(size) + (sizes.size() == 1 ? "," : ", ");
  if (sizes.size() > 1) name.resize(name.size() - 2);
  return name + ")";
}

// One to five modes, and the sizes around every block: 32 and 64 (transposes, tiles, leaves), 128
// and 160 (where products change kind, and where a small triangle ends), 1 wherever it can be.
// clang-format off
inline const std::vector<Shape> kShapes = {
    {1}, {9}, {31}, {33}, {65}, {159}, {160}, {161}, {300},
    {1, 1}, {9, 31}, {33, 9}, {32, 33}, {63, 65}, {1, 65}, {64, 1}, {200, 1}, {128, 70}, {129, 63},
    {160, 9}, {9, 161},
    {3, 5, 9}, {1, 33, 2}, {17, 1, 9}, {31, 32, 9}, {9, 9, 64}, {2, 161, 3}, {1, 1, 1},
    {3, 4, 5, 6}, {1, 9, 1, 2}, {2, 3, 2, 5, 4}, {33, 1, 2, 1, 3}};
// clang-format on

struct Layout {
  const char* name;
  Shape (*strides)(const Shape& sizes);
  int64_t offset;  // elements before the first
};

// Strides for the modes from the slowest to the fastest. A mode of size 1 has a stride that nobody
// may look at.
inline Shape strides_in_order(const Shape& sizes, const std::vector<size_t>& order, int64_t step,
                              int64_t gap) {
  constexpr int64_t kOfNoUse = 1000;
  Shape strides(sizes.size());
  for (auto mode = order.rbegin(); mode != order.rend(); ++mode) {
    strides[*mode] = sizes[*mode] == 1 ? kOfNoUse : step;
    step = step * sizes[*mode] + gap;
  }
  return strides;
}

inline std::vector<size_t> modes_in_order(const Shape& sizes) {
  std::vector<size_t> order(sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  return order;
}

inline Shape row_major(const Shape& sizes) {
  return strides_in_order(sizes, modes_in_order(sizes), 1, 0);
}

inline Shape column_major(const Shape& sizes) {
  auto order = modes_in_order(sizes);
  std::reverse(order.begin(), order.end());
  return strides_in_order(sizes, order, 1, 0);
}

// A convolution's channels_last.
inline Shape second_fastest(const Shape& sizes) {
  auto order = modes_in_order(sizes);
  if (order.size() > 1) std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  return strides_in_order(sizes, order, 1, 0);
}

inline Shape padded_rows(const Shape& sizes) {
  return strides_in_order(sizes, modes_in_order(sizes), 1, 5);
}

inline Shape padded_columns(const Shape& sizes) {
  auto order = modes_in_order(sizes);
  std::reverse(order.begin(), order.end());
  return strides_in_order(sizes, order, 1, 7);
}

inline Shape every_other(const Shape& sizes) {
  return strides_in_order(sizes, modes_in_order(sizes), 2, 3);
}

inline Shape first_expanded(const Shape& sizes) {
  Shape strides = row_major(sizes);
  strides.front() = 0;
  return strides;
}

inline Shape last_expanded(const Shape& sizes) {
  Shape strides = row_major(sizes);
  strides.back() = 0;
  return strides;
}

// Windows that overlap.
inline Shape all_one(const Shape& sizes) { return Shape(sizes.size(), 1); }

constexpr Layout kContiguous{"contiguous", row_major, 0};
constexpr Layout kLayouts[] = {
    kContiguous,
    {"column-major", column_major, 0},
    {"channels last", second_fastest, 0},
    {"padded rows", padded_rows, 1},
    {"padded columns", padded_columns, 3},
    {"every other element", every_other, 1},
};
// Elements share memory: to be read only.
constexpr Layout kSharingLayouts[] = {
    {"first mode expanded", first_expanded, 0},
    {"last mode expanded", last_expanded, 1},
    {"overlapping", all_one, 0},
};

// f(offset) for every element, in row-major order.
template <typename F>
void for_each_offset(const Shape& sizes, const Shape& strides, const F& f) {
  if (count_of(sizes) == 0) return;
  Shape index(sizes.size(), 0);
  int64_t offset = 0;
  for (size_t i = 1; i > 0;) {
    f(offset);
    for (i = sizes.size(); i > 0; --i) {
      offset += strides[i - 1];
      if (++index[i - 1] < sizes[i - 1]) break;
      offset -= sizes[i - 1] * strides[i - 1];
      index[i - 1] = 0;
    }
  }
}

// Its values are what its memory holds: rounded, and where elements share memory, the last written.
class Tensor {
 public:
  Tensor(Element element, Shape sizes, const Values& values, const Layout& layout = kContiguous)
      : element_(element),
        sizes_(std::move(sizes)),
        strides_(layout.strides(sizes_)),
        first_(layout.offset) {
    int64_t end = first_ + 1;
    for (size_t i = 0; i < sizes_.size(); ++i) end += (sizes_[i] - 1) * strides_[i];
    if (count_of(sizes_) == 0) end = 0;
    memory_.assign(static_cast<size_t>(end) * width(), kGap);
    size_t next = 0;
    for_each_offset(sizes_, strides_,
                    [&](int64_t offset) { store(element_, values[next++], at(offset)); });
  }

  Element element() const { return element_; }
  const Shape& sizes() const { return sizes_; }
  int64_t count() const { return count_of(sizes_); }
  const std::vector<unsigned char>& memory() const { return memory_; }

  // As the kernels see it: points into this tensor.
  tnt::TensorView view() const {
    const auto order = static_cast<int64_t>(sizes_.size());
    return {memory_.empty() ? nullptr : at(0), element_, order, sizes_.data(), strides_.data()};
  }
  void* data() { return memory_.empty() ? nullptr : at(0); }

  Values values() const {
    Values values;
    values.reserve(static_cast<size_t>(count()));
    for_each_offset(sizes_, strides_,
                    [&](int64_t offset) { values.push_back(load(element_, at(offset))); });
    return values;
  }

  bool gaps_untouched() const {
    std::vector<unsigned char> rest = memory_;
    for_each_offset(sizes_, strides_, [&](int64_t offset) {
      std::fill_n(rest.begin() + (first_ + offset) * static_cast<int64_t>(width()), width(), kGap);
    });
    return std::all_of(rest.begin(), rest.end(), [](unsigned char byte) { return byte == kGap; });
  }

 private:
  static constexpr unsigned char kGap = 0xff;  // all of them make a NaN of any type

  size_t width() const { return width_of(element_); }
  unsigned char* at(int64_t offset) {
    return memory_.data() + static_cast<size_t>(first_ + offset) * width();
  }
  const unsigned char* at(int64_t offset) const { return const_cast<Tensor*>(this)->at(offset); }

  Element element_;
  Shape sizes_, strides_;
  int64_t first_;
  std::vector<unsigned char> memory_;
};
