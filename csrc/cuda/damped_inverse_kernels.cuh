// The kernels of damped_inverse as phases (phases.cuh); block_inverse.cuh has a matrix's inverse.
#pragma once

#include <cmath>
#include <limits>

#include "cuda/block_inverse.cuh"
#include "cuda/damped_inverse.cuh"
#include "cuda/phases.cuh"

namespace tnt::cuda {

// One tensor: c = (tr S_1 / prod d)^(1/k), and c^(k-1) prod_{j != i} d_j = tr S_1 / (c d_i), a form
// that does not overflow or underflow.
struct Rescale {
  static constexpr int kGroup = 16;  // threads whose sums one thread adds

  struct Shared {
    double sums[kThreads];
  };

  const Call& call;
  Shared& shared;
  int64_t tensor;

  template <typename Run>
  TNT_DEVICE void phases(const Run& run) {
    run([&](Thread thread) { add_entries(thread); });
    run([&](Thread thread) { add_sums(thread, kGroup, 1); });
    run([&](Thread thread) { add_sums(thread, thread.count, kGroup); });
    run([&](Thread thread) { finish(thread); });
  }

 private:
  TNT_DEVICE const TensorRow& row() const { return call.tensors[tensor]; }

  // Not compensated: each thread adds few entries, 200 of 50,000, so even roundings of the same
  // sign, as of equal entries, stay small.
  template <typename T>
  TNT_DEVICE double sum_of(const ModeRow& mode, Thread thread) const {
    const T* stat = static_cast<const T*>(mode.stat);
    const int64_t step = mode.diagonal ? mode.row : mode.row + mode.column;
    double sum = 0;
    for (int64_t i = thread.index; i < mode.d; i += thread.count) {
      sum += static_cast<double>(stat[i * step]);
    }
    return sum;
  }

  TNT_DEVICE void add_entries(Thread thread) const {
    const ModeRow& first = call.modes[row().first_mode];
    shared.sums[thread.index] =
        row().is_double ? sum_of<double>(first, thread) : sum_of<float>(first, thread);
  }

  // Adds every `step`-th of the sums of `group` threads to the first.
  TNT_DEVICE void add_sums(Thread thread, int group, int step) const {
    if (thread.index % group != 0) return;
    const int end = thread.index + group < thread.count ? thread.index + group : thread.count;
    for (int other = thread.index + step; other < end; other += step) {
      shared.sums[thread.index] += shared.sums[other];
    }
  }

  TNT_DEVICE void finish(Thread thread) const {
    const double trace = shared.sums[0];
    double size = 1;
    for (int i = 0; i < row().order; ++i) {
      size *= static_cast<double>(call.modes[row().first_mode + i].d);
    }
    const double root = 1.0 / row().order;
    const double c = size == 0 ? 0 : pow(trace, root) / pow(size, root);
    for (int i = thread.index; i < row().order; i += thread.count) {
      const int mode = row().first_mode + i;
      const auto d = static_cast<double>(call.modes[mode].d);
      call.scales[mode] = c == 0 ? 0 : c / trace * d;
    }
    if (thread.index != 0) return;
    const double damping =
        call.damping_on_device == nullptr ? call.damping : *call.damping_on_device;
    call.eps[tensor] = !call.relative ? damping : c == 0 ? 1 : damping * c;
  }
};

// A matrix, or a piece of a diagonal.
template <typename T>
struct Invert {
  const Call& call;
  std::byte* shared;  // shared_bytes<T>() of the largest matrix
  const InverseRow& row;

  template <typename Run>
  TNT_DEVICE void phases(const Run& run) {
    const ModeRow& mode = call.modes[row.mode];
    const T scale = static_cast<T>(call.scales[row.mode]);
    const T eps = static_cast<T>(call.eps[mode.tensor]);
    T* to = reinterpret_cast<T*>(call.scratch + mode.scratch);
    int& bad = *reinterpret_cast<int*>(shared);
    run([&](Thread thread) {
      if (thread.index == 0) bad = 0;
    });
    if (mode.diagonal) {
      run([&](Thread thread) {
        invert_diagonal(static_cast<const T*>(mode.stat), mode.row, scale, eps, to, bad, thread);
      });
    } else {
      BlockInverse<T>(shared, static_cast<int>(mode.d))
          .phases({static_cast<const T*>(mode.stat), mode.row, mode.column, scale, eps}, to, run);
    }
    run([&](Thread thread) {
      if (thread.index == 0) call.bad[row.slot] = bad;
    });
  }

 private:
  TNT_DEVICE void invert_diagonal(const T* stat, int64_t step, T scale, T eps, T* to, int& bad,
                                  Thread thread) const {
    for (int64_t i = thread.index; i < row.count; i += thread.count) {
      const int64_t at = row.first + i;
      const T u = stat[at * step] * scale;
      const T damped = u + eps;
      const T inverse = 1 / damped;
      to[at] = inverse;
      // u too, because the inverse of infinity is 0.
      if (!(damped > 0) || !is_finite(u) || !is_finite(inverse)) bad = 1;
    }
  }
};

// kThreads tensors, one thread each.
struct Judge {
  const Call& call;
  int64_t first, tensors;

  template <typename Run>
  TNT_DEVICE void phases(const Run& run) {
    run([&](Thread thread) {
      if (first + thread.index < tensors) judge(first + thread.index);
    });
  }

 private:
  TNT_DEVICE void judge(int64_t tensor) const {
    const TensorRow& row = call.tensors[tensor];
    int32_t info = 0;
    for (int32_t i = row.order; i > 0; --i) {
      const ModeRow& mode = call.modes[row.first_mode + i - 1];
      for (int32_t slot = 0; slot < mode.slots; ++slot) {
        if (call.bad[mode.first_slot + slot] != 0) info = i;
      }
    }
    call.info[tensor] = info;
  }
};

// Some entries of a factor.
struct Commit {
  const Call& call;
  const CopyRow& row;

  template <typename Run>
  TNT_DEVICE void phases(const Run& run) {
    const ModeRow& mode = call.modes[row.mode];
    if (call.info[mode.tensor] != 0) return;
    const bool is_double = call.tensors[mode.tensor].is_double != 0;
    run([&](Thread thread) { is_double ? copy<double>(mode, thread) : copy<float>(mode, thread); });
  }

 private:
  template <typename T>
  TNT_DEVICE void copy(const ModeRow& mode, Thread thread) const {
    const T* from = reinterpret_cast<const T*>(call.scratch + mode.scratch) + row.first;
    T* to = static_cast<T*>(mode.out) + row.first;
    for (int64_t i = thread.index; i < row.count; i += thread.count) to[i] = from[i];
  }
};

}  // namespace tnt::cuda
