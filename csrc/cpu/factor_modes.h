// Shared by damped_inverse and inverse_root: statistics in, factors out, a flag for each tensor.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "cpu/tasks.h"
#include "cpu/transpose.h"
#include "cpu/views.h"

namespace tnt {

// One mode's statistic and its factor, in different memory: row-major (d, d), or (d,) if diagonal.
struct FactorMode {
  const void* stat;
  void* out;
  int64_t d;
  bool diagonal;
  double shift = 0;  // inverse_root's relative damping, added first, rounded to the dtype

  int64_t count() const { return diagonal ? d : d * d; }
};

struct TensorModes {
  std::vector<FactorMode> modes;
  Element element;

  int64_t bytes_each() const { return element == Element::kDouble ? 8 : 4; }  // of a number
};

template <typename T>
auto bits_of(T value) {
  return std::bit_cast<std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>(value);
}

// The sum of a statistic's diagonal. It is compensated: the roundings of equal entries would all
// have the same sign.
template <typename T>
double trace_of(const FactorMode& mode) {
  const T* stat = static_cast<const T*>(mode.stat);
  double trace = 0, lost = 0;
  for (int64_t i = 0; i < mode.d; ++i) {
    const double entry = stat[mode.diagonal ? i : i * (mode.d + 1)], sum = trace + entry;
    lost += trace >= entry ? (trace - sum) + entry : (entry - sum) + trace;
    trace = sum;
  }
  return trace + lost;
}

// Whether a statistic counts as zero: its average eigenvalue is below kLeast. Tasks flush subnormal
// numbers to zero; below it they matter, and a statistic without them may be indefinite.
template <typename T>
bool counts_as_zero(const FactorMode& mode, double trace) {
  constexpr double kLeast = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
  return std::abs(trace / static_cast<double>(mode.d)) < kLeast;
}

// Adding 1 to an exponent with all bits set carries into the sign bit. (The compiler does not
// vectorise comparisons of floats.)
template <typename T>
bool all_finite(const T* values, int64_t count) {
  using Bits = decltype(bits_of(T{}));
  constexpr Bits kSign = Bits{1} << (8 * sizeof(T) - 1);
  constexpr Bits kUnit = Bits{1} << (std::numeric_limits<T>::digits - 1);
  constexpr Bits kExponent = kSign - kUnit;
  Bits seen = 0;
  for (int64_t i = 0; i < count; ++i) seen |= (bits_of(values[i]) & kExponent) + kUnit;
  return (seen & kSign) == 0;
}

// The lower triangle of a square matrix <- its upper triangle.
template <typename T>
void mirror_upper(T* matrix, int64_t n) {
  constexpr int64_t kRows = 32;
  for (int64_t r = 0; r < n; r += kRows) {
    const int64_t rows = std::min(kRows, n - r);
    for (int64_t i = r; i < r + rows; ++i) {
      for (int64_t j = i + 1; j < r + rows; ++j) matrix[j * n + i] = matrix[i * n + j];
    }
    transpose(matrix + r * n + r + rows, n, matrix + (r + rows) * n + r, n, rows, n - r - rows);
  }
}

// Calls make(t, mode, zero, scratch) for all modes of all tensors. make writes the factor to the
// mode's `out` (the diagonal and upper triangle of a matrix) and returns whether the factor is
// good. If a factor of a tensor is bad, all factors of the tensor are restored, and info[t] is i +
// 1 for the first bad mode i. make takes bytes(mode, zero) of its scratch; zero has the factor's
// type.
template <typename Bytes, typename Make>
void make_factors(const std::vector<TensorModes>& tensors, double flops_per_cube,
                  const Bytes& bytes, const Make& make, int32_t* info) {
  struct Pending {
    bool begun = false;
    char* saved = nullptr;  // the factors' old values; null if they have none
    std::atomic<int64_t> missing;
    std::atomic<int32_t> first_bad;
  };
  struct Task {
    size_t tensor, mode;
    double flops;
    size_t offset;  // where its factor's old values are
  };
  const auto pending = std::make_unique<Pending[]>(tensors.size());
  std::vector<Task> tasks;
  std::vector<double> costs(tensors.size(), 0);
  size_t most_saved = 0;  // of one tensor
  for (size_t t = 0; t < tensors.size(); ++t) {
    const auto& modes = tensors[t].modes;
    pending[t].missing = static_cast<int64_t>(modes.size());
    pending[t].first_bad = static_cast<int32_t>(modes.size()) + 1;
    size_t offset = 0;
    for (size_t i = 0; i < modes.size(); ++i) {
      const auto d = static_cast<double>(modes[i].d);
      const double flops = modes[i].diagonal ? 16 * d : flops_per_cube * d * d * d + 64 * d * d;
      tasks.push_back({t, i, flops, offset});
      costs[t] += flops;
      offset += Scratch::bytes_of<char>(modes[i].count() * tensors[t].bytes_each());
    }
    most_saved = std::max(most_saved, offset);
  }
  // A tensor's modes stay together, so that few tensors are unfinished at any time.
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
    const double x = costs[a.tensor], y = costs[b.tensor];
    if (x != y) return x > y;
    return a.tensor != b.tensor ? a.tensor < b.tensor : a.flops > b.flops;
  });
  std::vector<double> flops;
  for (const Task& task : tasks) flops.push_back(task.flops);
  const Order order = order_of(flops);

  // At most the tensors of large tasks, and one for each thread, are unfinished at any time. Only
  // pages that are written take memory.
  const auto threads =
      static_cast<size_t>(threads_for(static_cast<int64_t>(order.rest.size()), order.flops));
  const size_t slots = std::min(tensors.size(), order.large.size() + threads);
  const Workspace memory(slots * most_saved);
  std::vector<char*> free_slots;
  Scratch rest = memory.all();
  for (size_t i = 0; i < slots; ++i) {
    free_slots.push_back(rest.take<char>(static_cast<int64_t>(most_saved)));
  }
  std::mutex mutex;

  const auto save = [&](const Task& task, const FactorMode& mode, int64_t size) {
    Pending& state = pending[task.tensor];
    {
      const std::lock_guard lock(mutex);
      if (!state.begun) {
        state.begun = true;
        state.saved = free_slots.back();
        free_slots.pop_back();
      }
    }
    std::copy_n(static_cast<const char*>(mode.out), size, state.saved + task.offset);
  };
  const auto restore = [&](const TensorModes& tensor, const char* saved) {
    for (const FactorMode& mode : tensor.modes) {
      const int64_t size = mode.count() * tensor.bytes_each();
      std::copy_n(saved, size, static_cast<char*>(mode.out));
      saved += Scratch::bytes_of<char>(size);
    }
  };
  const auto run = [&](const Task& task, Scratch scratch) {
    const TensorModes& tensor = tensors[task.tensor];
    const FactorMode& mode = tensor.modes[task.mode];
    Pending& state = pending[task.tensor];
    save(task, mode, mode.count() * tensor.bytes_each());
    const bool is_good = with_state(
        tensor.element, [&](auto zero) { return make(task.tensor, mode, zero, scratch); });
    if (!is_good) {
      const auto code = static_cast<int32_t>(task.mode) + 1;
      int32_t seen = state.first_bad;
      while (code < seen && !state.first_bad.compare_exchange_weak(seen, code)) {
      }
    }
    if (--state.missing > 0) return;
    const bool good = state.first_bad > static_cast<int32_t>(tensor.modes.size());
    info[task.tensor] = good ? 0 : state.first_bad.load();
    if (!good) restore(tensor, state.saved);
    for (const FactorMode& one : tensor.modes) {
      with_state(tensor.element, [&](auto zero) {
        if (good && !one.diagonal) mirror_upper(static_cast<decltype(zero)*>(one.out), one.d);
      });
    }
    const std::lock_guard lock(mutex);
    free_slots.push_back(state.saved);  // allocates nothing
  };
  run_in_order(
      order,
      [&](size_t i) {
        const TensorModes& tensor = tensors[tasks[i].tensor];
        return with_state(tensor.element,
                          [&](auto zero) { return bytes(tensor.modes[tasks[i].mode], zero); });
      },
      [&](size_t i, Scratch scratch) { run(tasks[i], scratch); });
}

}  // namespace tnt
