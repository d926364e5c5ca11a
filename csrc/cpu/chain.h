// The mode products G x_1 A_1 ... x_k A_k, which three operators share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/blas.h"
#include "cpu/elementwise.h"
#include "cpu/tasks.h"
#include "cpu/transpose.h"

namespace tnt {

// A factor of a mode of size d: row-major (d, d), symmetric, or (d,) if diagonal.
struct Factor {
  const void* data;
  int64_t d;
  bool diagonal;
};

// The flops of a tensor's products; a diagonal factor counts as its memory traffic.
inline double chain_flops(const std::vector<Factor>& factors) {
  double count = 1, sum = 0;
  for (const Factor& factor : factors) {
    count *= static_cast<double>(factor.d);
    sum += factor.diagonal || factor.d == 1 ? 16 : static_cast<double>(factor.d);
  }
  return 2 * count * sum;
}

// Products with a factor up to this size are split into panels of at most this many numbers.
constexpr int64_t kSmallFactor = 128;
constexpr int64_t kPanel = 1 << 13;

// Out (d, rest) <- alpha A In^T + beta Out, for In (rest, d): one mode's product, which moves the
// last mode to the front. Otherwise the products of middle modes would be strided, and skinny if
// the modes behind them are small (a convolution's 9). If `rounded` is not null, it is memory for
// d (d + rest) numbers, and both operands are rounded to bfloat16. `vector` is memory for d numbers
// if `rest` is 1.
template <typename T>
void rotating_product(const Factor& factor, int64_t rest, T alpha, const T* in, T beta, T* out,
                      T* vector, BFloat16* rounded) {
  const int64_t d = factor.d;
  const T* a = static_cast<const T*>(factor.data);
  const double flops = 2 * static_cast<double>(rest) * static_cast<double>(d) *
                       static_cast<double>(factor.diagonal ? 16 : d);
  if (rest == 1 && !factor.diagonal) {
    // Not into `out`: the BLAS would round it after every column. Zeros, because 0 * NaN is NaN.
    std::fill_n(vector, d, T(0));
    blas::symv(d, alpha, a, in, T(0), vector);
    for (int64_t i = 0; i < d; ++i) out[i] = vector[i] + (beta == 0 ? T(0) : beta * out[i]);
    return;
  }
  // One tile for each thread, because the BLAS packs the operand that is not split in every tile.
  const int64_t cuts = flops < kParallelFlops ? 1 : parallelism();
  const bool cut_rest = factor.diagonal || rest >= 64 * cuts;
  const int64_t whole = cut_rest ? rest : d;
  const int64_t side = std::max<int64_t>(((whole + cuts - 1) / cuts + 15) / 16 * 16, 1);
  const bool rounds =
      rounded != nullptr && !factor.diagonal && std::min(d, rest) >= blas::kLeastRounded;
  if constexpr (std::is_same_v<T, float>) {
    if (rounds) round_all(a, d * d, rounded);
    if (rounds) round_all(in, rest * d, rounded + d * d);
  }
  run_tasks((whole + side - 1) / side, flops, [&](int64_t task) {
    const int64_t first = task * side, size = std::min(side, whole - first);
    const auto multiply = [&](const auto* left, const auto* right) {
      if (cut_rest) {
        blas::gemm(blas::Transposed::kSecond, d, size, d, alpha, left, d, right + first * d, d,
                   beta, out + first, rest);
      } else {
        blas::gemm(blas::Transposed::kSecond, size, rest, d, alpha, left + first * d, d, right, d,
                   beta, out + first * rest, rest);
      }
    };
    if constexpr (std::is_same_v<T, float>) {
      if (rounds) return multiply(rounded, rounded + d * d);
    }
    if (factor.diagonal) {
      constexpr int64_t kRows = 32, kColumns = 256;
      T tile[kRows * kColumns];  // stays in the cache
      for (int64_t r = first; r < first + size; r += kRows) {
        const int64_t rows = std::min(kRows, first + size - r);
        for (int64_t c = 0; c < d; c += kColumns) {
          const int64_t columns = std::min(kColumns, d - c);
          T* target = out + c * rest + r;
          if (beta != 0) {
            // The sum needs both terms in one layout.
            transpose(target, rest, tile, columns, columns, rows);
            for (int64_t i = 0; i < rows * columns; ++i) tile[i] *= beta;
          } else {
            std::fill_n(tile, rows * columns, T(0));
          }
          for (int64_t i = 0; i < rows; ++i) {
            const T* source = in + (r + i) * d + c;
            T* line = tile + i * columns;
            for (int64_t j = 0; j < columns; ++j) line[j] += alpha * (a[c + j] * source[j]);
          }
          transpose(tile, columns, target, rest, rows, columns);
        }
      }
    } else if (cut_rest && d <= kSmallFactor) {
      // Panels that the BLAS does not pack. Transposing them first is faster than a product with
      // the transposed operand: the BLAS then loads whole vectors of columns.
      const int64_t step = std::clamp<int64_t>(blas::kUnpackedProduct / (d * d), 1, kPanel / d);
      T panel[std::max(kPanel, kSmallFactor)];
      for (int64_t r = first; r < first + size; r += step) {
        const int64_t rows = std::min(step, first + size - r);
        transpose(in + r * d, d, panel, rows, rows, d);
        blas::gemm(blas::Transposed::kFirst, d, rows, d, alpha, a, d, panel, rows, beta, out + r,
                   rest);
      }
    } else {
      multiply(a, in);
    }
  });
}

// How many buffers of the tensor's size the products take: two that alternate, or one if there are
// two products, or a single one (of a vector).
inline int64_t buffers_of(int64_t products) {
  return std::clamp<int64_t>(products - 1, products == 1 ? 1 : 0, 2);
}

// How many numbers of workspace chain_product needs.
inline int64_t chain_scratch(const std::vector<Factor>& factors, bool rounded) {
  int64_t count = 1, products = 0, largest = 0;
  for (const Factor& factor : factors) {
    count *= factor.d;
    products += factor.d != 1;
    if (!factor.diagonal) largest = std::max(largest, factor.d * factor.d);
  }
  const int64_t halves = rounded && largest > 1 ? (count + largest + 1) / 2 : 0;
  return count * buffers_of(products) + halves;
}

// out <- alpha (G x_1 A_1 ... x_k A_k) + beta out, both contiguous. If beta is 0, out may be G: the
// last product alone writes it. Runs on one thread inside a task, else on all threads. `rounded`:
// float operands may be rounded to bfloat16.
template <typename T>
void chain_product(const std::vector<Factor>& factors, const T* tensor, T alpha, T beta, T* out,
                   T* scratch, bool rounded) {
  int64_t count = 1, products = 0;
  for (const Factor& factor : factors) {
    count *= factor.d;
    if (factor.d == 1) {
      alpha *= *static_cast<const T*>(factor.data);  // a mode of size 1 scales everything
    } else {
      ++products;
    }
  }
  if (count == 0) return;
  if (products == 0) {
    out[0] = beta == 0 ? alpha * tensor[0] : alpha * tensor[0] + beta * out[0];
    return;
  }
  T* const buffers[2] = {scratch, scratch + count};
  T* const rest_of_scratch = scratch + count * buffers_of(products);
  auto* halves =
      rounded && std::is_same_v<T, float> ? reinterpret_cast<BFloat16*>(rest_of_scratch) : nullptr;
  const T* in = tensor;
  int64_t done = 0;
  for (auto factor = factors.rbegin(); factor != factors.rend(); ++factor) {
    if (factor->d == 1) continue;
    const int64_t rest = count / factor->d;
    if (++done == products) {
      rotating_product(*factor, rest, alpha, in, beta, out, scratch, halves);
    } else {
      T* target = buffers[(done - 1) % 2];
      rotating_product(*factor, rest, T(1), in, T(0), target, scratch, halves);
      in = target;
    }
  }
}

// An item with more flops runs on all threads. Smaller items, and vectors (one call of the BLAS),
// run on one thread each.
constexpr double kLargeFlops = 2e7;

// Calls run(i, buffers) for every item, which has `factors`: large items one after the other, so
// that only one of them is in memory, and small ones in parallel, the costliest first. Item i gets
// count(i, zero) numbers; zero has the state's type for the element of the item.
template <typename Item, typename ElementOf, typename Count, typename Run>
void run_chains(const std::vector<Item>& items, const ElementOf& element_of, const Count& count,
                const Run& run) {
  blas::use_one_thread_per_call();
  std::vector<double> flops;
  Order order;
  for (size_t i = 0; i < items.size(); ++i) {
    const std::vector<Factor>& factors = items[i].factors;
    flops.push_back(chain_flops(factors));
    const auto products = std::count_if(factors.begin(), factors.end(),
                                        [](const Factor& factor) { return factor.d != 1; });
    if (flops[i] >= kLargeFlops && products > 1 && parallelism() > 1) {
      order.large.push_back(i);
    } else {
      order.rest.push_back(i);
      order.flops += flops[i];
    }
  }
  std::stable_sort(order.rest.begin(), order.rest.end(),
                   [&](size_t a, size_t b) { return flops[a] > flops[b]; });
  run_in_order(
      order,
      [&](size_t i) {
        return with_state(element_of(items[i]), [&](auto zero) {
          return Scratch::bytes_of<decltype(zero)>(count(i, zero));
        });
      },
      [&](size_t i, Scratch scratch) {
        with_state(element_of(items[i]),
                   [&](auto zero) { run(i, scratch.take<decltype(zero)>(count(i, zero))); });
      });
}

}  // namespace tnt
