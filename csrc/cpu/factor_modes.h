// What damped_inverse and inverse_root share: statistics in, factors out, a flag for each tensor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "cpu/tasks.h"
#include "cpu/transpose.h"
#include "cpu/views.h"

namespace tnt {

// One mode's statistic and where its factor goes: row-major (d, d), or (d,) if diagonal. Not the
// same memory.
struct FactorMode {
  const void* stat;
  void* out;
  int64_t d;
  bool diagonal;

  int64_t count() const { return diagonal ? d : d * d; }
};

struct TensorModes {
  std::vector<FactorMode> modes;
  Element element;
};

// Allocates for std::vector, and leaves new elements as they are.
template <typename T>
struct Uninitialised : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Uninitialised<U>;
  };
  template <typename U>
  void construct(U*) {}
};

// Memory for results, passed on from tensor to tensor: with fresh pages for each, the system would
// spend its time clearing them.
class ResultPool {
 public:
  using Result = std::vector<char, Uninitialised<char>>;

  Result take(size_t bytes) {
    Result result;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        result = std::move(free_.back());
        free_.pop_back();
      }
    }
    result.clear();  // nothing of it is to be moved
    result.resize(bytes);
    return result;
  }

  void give_back(Result&& result) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(result));
  }

 private:
  std::mutex mutex_;
  std::vector<Result> free_;
};

// By the exponents, as integers: comparisons of floats would not be done several at a time.
template <typename T>
bool all_finite(const T* values, int64_t count) {
  using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  constexpr Bits kExponent = sizeof(T) == 4 ? Bits{0x7f800000} : static_cast<Bits>(0x7ffll << 52);
  Bits most = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    most = std::max(most, bits & kExponent);
  }
  return most != kExponent;
}

// out <- result, and its upper triangle mirrored.
template <typename T>
void write_factor(const FactorMode& mode, const T* result) {
  T* out = static_cast<T*>(mode.out);
  const int64_t d = mode.d;
  if (mode.diagonal) {
    std::copy_n(result, d, out);
    return;
  }
  constexpr int64_t kRows = 32;
  for (int64_t r = 0; r < d; r += kRows) {
    const int64_t rows = std::min(kRows, d - r);
    for (int64_t i = r; i < r + rows; ++i) {
      std::copy(result + i * d + i, result + (i + 1) * d, out + i * d + i);
      for (int64_t j = i + 1; j < r + rows; ++j) out[j * d + i] = result[i * d + j];
    }
    transpose(result + r * d + r + rows, d, out + (r + rows) * d + r, d, rows, d - r - rows);
  }
}

// Makes the factors of every tensor by make(tensor, mode, result, scratch), which writes the upper
// triangle of a full mode's factor to `result` and says whether it is good. A tensor's factors are
// written out once all of them are, or not at all: info[t] is then i + 1 for the first bad mode i.
// cost(tensor, mode) in flops.
template <typename Make>
void make_factors(const std::vector<TensorModes>& tensors, double flops_per_cube, const Make& make,
                  int32_t* info) {
  // The results wait here for the other modes of their tensor; those of a tensor that is complete
  // are given back.
  struct Pending {
    std::vector<ResultPool::Result> results;
    std::atomic<int64_t> missing;
    std::atomic<int32_t> first_bad;
  };
  struct Task {
    int64_t tensor, mode;
    double flops;
  };
  const auto count = static_cast<int64_t>(tensors.size());
  const auto pending = std::make_unique<Pending[]>(tensors.size());
  ResultPool pool;
  std::vector<Task> tasks;
  std::vector<double> costs(tensors.size(), 0);
  double total = 0;
  for (int64_t t = 0; t < count; ++t) {
    const auto& modes = tensors[static_cast<size_t>(t)].modes;
    const auto order = static_cast<int64_t>(modes.size());
    pending[t].results.resize(modes.size());
    pending[t].missing = order;
    pending[t].first_bad = static_cast<int32_t>(order) + 1;
    for (int64_t i = 0; i < order; ++i) {
      const FactorMode& mode = modes[static_cast<size_t>(i)];
      const auto d = static_cast<double>(mode.d);
      const double flops = mode.diagonal ? 16 * d : flops_per_cube * d * d * d + 64 * d * d;
      tasks.push_back({t, i, flops});
      costs[static_cast<size_t>(t)] += flops;
      total += flops;
    }
  }
  // A tensor's modes stay together, so that few tensors are in the making at any time.
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
    const double x = costs[static_cast<size_t>(a.tensor)], y = costs[static_cast<size_t>(b.tensor)];
    if (x != y) return x > y;
    return a.tensor != b.tensor ? a.tensor < b.tensor : a.flops > b.flops;
  });

  const auto run = [&](const Task& task, Scratch& scratch) {
    const TensorModes& tensor = tensors[static_cast<size_t>(task.tensor)];
    Pending& state = pending[task.tensor];
    const size_t width = tensor.element == Element::kDouble ? 8 : 4;
    const FactorMode& own = tensor.modes[static_cast<size_t>(task.mode)];
    ResultPool::Result& result = state.results[static_cast<size_t>(task.mode)];
    result = pool.take(static_cast<size_t>(own.count()) * width);
    if (!make(task.tensor, task.mode, result.data(), scratch)) {
      const auto code = static_cast<int32_t>(task.mode) + 1;
      int32_t seen = state.first_bad;
      while (code < seen && !state.first_bad.compare_exchange_weak(seen, code)) {
      }
    }
    if (--state.missing > 0) return;
    const auto order = static_cast<int64_t>(tensor.modes.size());
    const bool good = state.first_bad > order;
    info[task.tensor] = good ? 0 : state.first_bad.load();
    for (size_t i = 0; i < tensor.modes.size(); ++i) {
      if (good && tensor.element == Element::kDouble) {
        write_factor(tensor.modes[i], reinterpret_cast<const double*>(state.results[i].data()));
      } else if (good) {
        write_factor(tensor.modes[i], reinterpret_cast<const float*>(state.results[i].data()));
      }
      pool.give_back(std::move(state.results[i]));
    }
  };

  // A mode that alone would keep one thread busy for longer than the others have work gets all of
  // them.
  const double share = total / static_cast<double>(parallelism());
  size_t shared = 0;
  std::stable_partition(tasks.begin(), tasks.end(), [&](const Task& task) {
    const bool large = task.flops > 1.01 * share;
    shared += large;
    return large;
  });
  {
    const FlushSubnormals flush;
    Scratch scratch;
    for (size_t i = 0; i < shared; ++i) run(tasks[i], scratch);
  }
  run_tasks(static_cast<int64_t>(tasks.size() - shared), total, [&](int64_t i, Scratch& scratch) {
    run(tasks[shared + static_cast<size_t>(i)], scratch);
  });
}

}  // namespace tnt
