// Loops over the elements of tensors of one shape with any strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <type_traits>

#include "cpu/tasks.h"
#include "cpu/views.h"

// Compiles a function for several CPUs. Not under sanitizers: the loader selects before they start.
#if defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(TNT_STD_THREADS)
#define TNT_WIDEST_VECTORS \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TNT_WIDEST_VECTORS
#endif

namespace tnt {

// Memory-bound: 8192 elements of three tensors fill a third of a second-level cache.
constexpr int64_t kChunk = 8192;

// Elements whose squares are summed at a time, from the first-level cache.
constexpr int64_t kBlock = 1024;

// Dimensions of N tensors of one shape, the slowest first.
template <size_t N>
struct Dimension {
  int64_t size;
  std::array<int64_t, N> strides;
};
template <size_t N>
using Dimensions = PerDimension<Dimension<N>>;

// Appends a dimension faster than the others. It merges with the last one if every tensor can walk
// both with one stride.
template <size_t N>
void append(Dimensions<N>& dimensions, Dimension<N> next) {
  bool merges = !dimensions.empty();
  for (size_t n = 0; n < N; ++n) {
    merges = merges && dimensions.back().strides[n] == next.size * next.strides[n];
  }
  if (merges) next.size *= dimensions.back().size;
  if (merges) dimensions.pop_back();
  dimensions.push_back(next);
}

// Calls run(offsets, count) on runs of the elements [first, last) along the fastest dimension.
template <size_t N, typename Run>
void for_each_run(const Dimensions<N>& dimensions, int64_t first, int64_t last, const Run& run) {
  const Dimension<N>& fastest = dimensions.back();
  for (int64_t element = first; element < last;) {
    const int64_t within = element % fastest.size;
    std::array<int64_t, N> offsets;
    for (size_t n = 0; n < N; ++n) offsets[n] = within * fastest.strides[n];
    int64_t rest = element / fastest.size;
    for (size_t i = dimensions.size() - 1; i-- > 0;) {
      const int64_t index = rest % dimensions[i].size;
      rest /= dimensions[i].size;
      for (size_t n = 0; n < N; ++n) offsets[n] += index * dimensions[i].strides[n];
    }
    const int64_t count = std::min(fastest.size - within, last - element);
    run(offsets, count);
    element += count;
  }
}

// Calls run(chunk, offsets, count, strides), with an offset and a stride for each tensor, on runs
// that together visit every element once, on all threads. A chunk is `length` elements (the last
// may be shorter), whose runs one thread visits in order. `strides` are the tensors', of shape
// `sizes`.
template <size_t N, typename Run>
void for_each_run(int64_t order, const int64_t* sizes, const std::array<const int64_t*, N>& strides,
                  const Run& run, int64_t length = kChunk) {
  Dimensions<N> dimensions;
  int64_t count = 1;
  for (int64_t i = 0; i < order; ++i) {
    count *= sizes[i];
    if (sizes[i] == 1) continue;
    Dimension<N> next{sizes[i], {}};
    for (size_t n = 0; n < N; ++n) next.strides[n] = strides[n][i];
    append(dimensions, next);
  }
  if (count == 0) return;
  if (dimensions.empty()) dimensions.push_back({1, {}});
  const int64_t chunks = (count + length - 1) / length;
  run_parts(chunks, 16 * static_cast<double>(count), [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      for_each_run(dimensions, chunk * length, std::min((chunk + 1) * length, count),
                   [&](const auto& offsets, int64_t elements) {
                     run(chunk, offsets, elements, dimensions.back().strides);
                   });
    }
  });
}

using One = std::integral_constant<int64_t, 1>;

// Calls pass(stride...); if all strides are 1, as compile-time constants.
template <typename Strides, typename Pass>
auto with_strides(const Strides& strides, const Pass& pass) {
  return std::apply(
      [&](auto... stride) {
        return ((stride == 1) && ...) ? pass((void(stride), One())...) : pass(stride...);
      },
      strides);
}

// The sum of the runs' results, identical on any number of threads.
template <size_t N, typename Run>
double sum_over_elements(int64_t order, const int64_t* sizes,
                         const std::array<const int64_t*, N>& strides, const Run& run) {
  int64_t count = 1;
  for (int64_t i = 0; i < order; ++i) count *= sizes[i];
  // Longer chunks for more elements: the sums then fit on the stack.
  constexpr int64_t kMostSums = 1024;
  const int64_t least = (count + kMostSums - 1) / kMostSums;
  const int64_t length = kChunk * std::max<int64_t>((least + kChunk - 1) / kChunk, 1);
  double sums[kMostSums];
  double* const last = sums + (count + length - 1) / length;
  std::fill(sums, last, 0.0);
  for_each_run<N>(
      order, sizes, strides,
      [&](int64_t chunk, const auto& offsets, int64_t elements, const auto& own) {
        sums[chunk] += run(offsets, elements, own);
      },
      length);
  return std::accumulate(sums, last, 0.0);
}

// The sum of products of contiguous numbers, in double: float squares overflow and underflow early.
template <typename T>
double sum_of_products(const T* a, const T* b, int64_t count) {
  constexpr int64_t kLanes = 8;  // independent sums, which the compiler keeps in vectors
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(a[i + lane]) * b[i + lane];
    }
  }
  for (; i < count; ++i) lanes[i % kLanes] += static_cast<double>(a[i]) * b[i];
  return std::accumulate(lanes, lanes + kLanes, 0.0);
}

// The inner product of two tensors without gaps, by all threads.
template <typename T>
double inner_product(const T* a, const T* b, int64_t count) {
  const int64_t stride = 1;
  return sum_over_elements<1>(1, &count, {&stride}, [&](const auto& offsets, int64_t n, auto) {
    return sum_of_products(a + offsets[0], b + offsets[0], n);
  });
}

inline Strides contiguous_strides(const TensorView& tensor) {
  Strides strides(static_cast<size_t>(tensor.order));
  int64_t step = 1;
  for (int64_t i = tensor.order - 1; i >= 0; --i) {
    strides[static_cast<size_t>(i)] = step;
    step *= tensor.sizes[i];
  }
  return strides;
}

// How many T contiguous_data() copies.
template <typename T>
int64_t copied_count(const TensorView& view) {
  return view.element == kElement<T> && view.contiguous() ? 0 : view.count();
}

// The elements as contiguous T: the view's own memory, or a copy in `buffers`, which then moves on.
template <typename T>
const T* contiguous_data(const TensorView& view, T*& buffers) {
  if (copied_count<T>(view) == 0) return static_cast<const T*>(view.data);
  const Strides contiguous = contiguous_strides(view);
  T* to = buffers;
  with_element(view.element, [&](auto* null) {
    const auto* from = static_cast<decltype(null)>(view.data);
    for_each_run<2>(view.order, view.sizes, {contiguous.data(), view.strides},
                    [&](int64_t, const auto& offsets, int64_t count, const auto& strides) {
                      T* out = to + offsets[0];
                      const auto* in = from + offsets[1];
                      for (int64_t i = 0; i < count; ++i) {
                        out[i * strides[0]] = convert<T>(in[i * strides[1]]);
                      }
                    });
  });
  buffers += view.count();
  return to;
}

TNT_WIDEST_VECTORS inline void round_chunk(const float* from, int64_t count, BFloat16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = round_to<BFloat16>(from[i]);
}

// Rounds on all threads.
inline void round_all(const float* from, int64_t count, BFloat16* to) {
  run_parts(count, 16 * static_cast<double>(count), [&](int64_t first, int64_t last) {
    round_chunk(from + first, last - first, to + first);
  });
}

// A copy of a float tensor in `to`, rounded to bfloat16. It has the view's strides if the view has
// no gaps, else contiguous ones; `strides` keeps them.
inline TensorView rounded_copy(const TensorView& view, Strides& strides, BFloat16* to) {
  const auto* from = static_cast<const float*>(view.data);
  const int64_t count = view.count();
  int64_t span = 1;
  for (int64_t i = 0; i < view.order; ++i) span += (view.sizes[i] - 1) * view.strides[i];
  strides = contiguous_strides(view);
  if (count > 0 && span == count) {
    std::copy_n(view.strides, view.order, strides.begin());
    round_all(from, count, to);
  } else {
    for_each_run<2>(view.order, view.sizes, {strides.data(), view.strides},
                    [&](int64_t, const auto& offsets, int64_t length, const auto& steps) {
                      for (int64_t i = 0; i < length; ++i) {
                        to[offsets[0] + i * steps[0]] =
                            round_to<BFloat16>(from[offsets[1] + i * steps[1]]);
                      }
                    });
  }
  return {to, Element::kBFloat16, view.order, view.sizes, strides.data()};
}

}  // namespace tnt
