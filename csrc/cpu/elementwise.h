// Loops over the elements of tensors of one shape and unlike strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cpu/tasks.h"
#include "cpu/views.h"

// A function that is compiled for several CPUs, the best of them chosen when it is loaded. Not
// under sanitizers, which are not there yet by then.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(TNT_STD_THREADS)
#define TNT_WIDEST_VECTORS \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TNT_WIDEST_VECTORS
#endif

namespace tnt {

// Memory-bound: 8192 elements of three tensors fill a third of a second-level cache.
constexpr int64_t kChunk = 8192;

// run(chunk, offsets, count, strides) for runs that together visit every element once, on all
// threads; an offset and a stride for each tensor. Of each chunk, of kChunk elements but for the
// last, the runs are one thread's, in order. `strides` are the tensors' own, for the shape `sizes`.
template <size_t N, typename Run>
void for_each_run(int64_t order, const int64_t* sizes, const std::array<const int64_t*, N>& strides,
                  const Run& run) {
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
      run(chunk, offsets, length, fastest.strides);
      element += length;
    }
  });
}

// The same, where a run need not know its chunk.
template <size_t N, typename Run>
void for_each_element(int64_t order, const int64_t* sizes,
                      const std::array<const int64_t*, N>& strides, const Run& run) {
  for_each_run<N>(order, sizes, strides,
                  [&](int64_t, const auto& offsets, int64_t count, const auto& own) {
                    run(offsets, count, own);
                  });
}

// The sum of what the runs return, the same to the bit on any number of threads.
template <size_t N, typename Run>
double sum_over_elements(int64_t order, const int64_t* sizes,
                         const std::array<const int64_t*, N>& strides, const Run& run) {
  int64_t count = 1;
  for (int64_t i = 0; i < order; ++i) count *= sizes[i];
  std::vector<double> sums(static_cast<size_t>((count + kChunk - 1) / kChunk), 0.0);
  for_each_run<N>(order, sizes, strides,
                  [&](int64_t chunk, const auto& offsets, int64_t length, const auto& own) {
                    sums[static_cast<size_t>(chunk)] += run(offsets, length, own);
                  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The sum of squares of contiguous numbers. In double: squares leave float's range early.
template <typename T>
double sum_of_squares(const T* values, int64_t count) {
  constexpr int64_t kLanes = 8;  // sums side by side, for the compiler to keep in vectors
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) lanes[i % kLanes] += static_cast<double>(values[i]) * values[i];
  return std::accumulate(lanes, lanes + kLanes, 0.0);
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
