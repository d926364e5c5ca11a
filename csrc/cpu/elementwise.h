// Loops over the elements of tensors of one shape and unlike strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "cpu/tasks.h"
#include "cpu/views.h"

namespace tnt {

// run(offsets, count, strides) for runs that together visit every element once, on all threads; an
// offset and a stride for each tensor. `strides` are the tensors' own, for the shape `sizes`.
template <size_t N, typename Run>
void for_each_element(int64_t order, const int64_t* sizes,
                      const std::array<const int64_t*, N>& strides, const Run& run) {
  struct Dimension {
    int64_t size;
    std::array<int64_t, N> strides;
  };
  // Dimensions that touch in every tensor are one: contiguous tensors are a single run.
  std::vector<Dimension> dimensions;
  int64_t count = 1;
  for (int64_t i = 0; i < order; ++i) {
    count *= sizes[i];
    if (sizes[i] == 1) continue;
    Dimension next{sizes[i], {}};
    bool touches = !dimensions.empty();
    for (size_t n = 0; n < N; ++n) {
      next.strides[n] = strides[n][i];
      touches = touches && dimensions.back().strides[n] == sizes[i] * strides[n][i];
    }
    if (touches) next.size *= dimensions.back().size;
    if (touches) dimensions.pop_back();
    dimensions.push_back(next);
  }
  if (count == 0) return;
  if (dimensions.empty()) dimensions.push_back({1, {}});
  const Dimension& fastest = dimensions.back();
  // Memory-bound: 8192 elements of three tensors fill a third of a second-level cache.
  constexpr int64_t kChunk = 8192;
  const int64_t chunks = (count + kChunk - 1) / kChunk;
  run_tasks(chunks, 16 * static_cast<double>(count), [&](int64_t chunk, Scratch&) {
    const int64_t last = std::min((chunk + 1) * kChunk, count);
    for (int64_t element = chunk * kChunk; element < last;) {
      const int64_t within = element % fastest.size;
      std::array<int64_t, N> offsets;
      for (size_t n = 0; n < N; ++n) offsets[n] = within * fastest.strides[n];
      int64_t rest = element / fastest.size;
      for (size_t i = dimensions.size() - 1; i-- > 0;) {
        const int64_t index = rest % dimensions[i].size;
        rest /= dimensions[i].size;
        for (size_t n = 0; n < N; ++n) offsets[n] += index * dimensions[i].strides[n];
      }
      const int64_t length = std::min(fastest.size - within, last - element);
      run(offsets, length, fastest.strides);
      element += length;
    }
  });
}

// to, contiguous <- from, as T.
template <typename T>
void copy_contiguous(const TensorView& from, const int64_t* contiguous_strides, T* to) {
  with_element(from.element, [&](auto* null) {
    const auto* source = static_cast<decltype(null)>(from.data);
    for_each_element<2>(from.order, from.sizes, {contiguous_strides, from.strides},
                        [&](const auto& offsets, int64_t count, const auto& strides) {
                          T* out = to + offsets[0];
                          const auto* in = source + offsets[1];
                          for (int64_t i = 0; i < count; ++i) {
                            out[i * strides[0]] = convert<T>(in[i * strides[1]]);
                          }
                        });
  });
}

inline std::vector<int64_t> contiguous_strides(const TensorView& tensor) {
  std::vector<int64_t> strides(static_cast<size_t>(tensor.order));
  int64_t step = 1;
  for (int64_t i = tensor.order - 1; i >= 0; --i) {
    strides[static_cast<size_t>(i)] = step;
    step *= tensor.sizes[i];
  }
  return strides;
}

}  // namespace tnt
