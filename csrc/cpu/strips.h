// Products of one large matrix, in strips that run on all threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/blas.h"
#include "cpu/tasks.h"

namespace tnt {

constexpr int64_t kStrip = 256;

// Calls run(first, size) for the strips of [0, count).
template <typename Run>
void in_strips(int64_t count, double flops, const Run& run) {
  const int64_t strip = parallelism() > 1 ? kStrip : std::max<int64_t>(count, 1);
  run_tasks((count + strip - 1) / strip, flops, [&](int64_t task) {
    // The last strip first: in a triangle it is the longest.
    const int64_t first = ((count + strip - 1) / strip - 1 - task) * strip;
    run(first, std::min(strip, count - first));
  });
}

inline double cube(int64_t a, int64_t b, int64_t c) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

// C (n, n) <- alpha X X^T + beta C for X (n, k), or X^T X for X (k, n) if transposed. Column-major;
// only C's lower triangle is used. If beta is 0, C is not read.
template <typename T>
void rank_update(bool transposed, int64_t n, int64_t k, T alpha, const T* x, int64_t ldx, T beta,
                 T* c, int64_t ldc) {
  const char trans = transposed ? 'T' : 'N', other = transposed ? 'N' : 'T';
  in_strips(n, cube(n, n, k), [&](int64_t first, int64_t rows) {
    const T* own = x + first * (transposed ? ldx : 1);
    if (first > 0) {
      blas::fortran_gemm(trans, other, rows, first, k, alpha, own, ldx, x, ldx, beta, c + first,
                         ldc);
    }
    blas::fortran_syrk('L', trans, rows, k, alpha, own, ldx, beta, c + first * (ldc + 1), ldc);
  });
}

}  // namespace tnt
