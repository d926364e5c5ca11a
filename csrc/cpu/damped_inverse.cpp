#include <limits>

#include "cpu/operators.h"
#include "cpu/strips.h"

namespace tnt {
namespace {

// Matrices here are column-major, as in the BLAS, and only the lower triangle of symmetric ones is
// used (row-major, it is the upper one).
//
// Factorisation and inversion are recursive, down to leaves that LAPACK computes: its triangular
// products are several times as fast as its own inversion of a triangle, which works column by
// column on one thread. Inside a task everything is serial; a matrix that gets all threads is split
// into strips.

constexpr int64_t kLeaf = 32;
constexpr int64_t kFactorLeaf = 512;

int64_t half_of(int64_t n) { return (n / 2 + kLeaf - 1) / kLeaf * kLeaf; }

// A (n, n) <- L with A = L L^T; false if A is not positive definite.
template <typename T>
bool factorise(int64_t n, T* a, int64_t ld) {
  if (n <= kFactorLeaf || parallelism() == 1) return blas::fortran_potrf('L', n, a, ld) == 0;
  const int64_t half = half_of(n), rest = n - half;
  T *a21 = a + half, *a22 = a + half * (ld + 1);
  if (!factorise(half, a, ld)) return false;
  in_strips(rest, cube(rest, half, half), [&](int64_t first, int64_t rows) {
    blas::fortran_trsm('R', 'L', 'T', rows, half, T(1), a, ld, a21 + first, ld);
  });
  rank_update(false, rest, half, T(-1), a21, ld, T(1), a22, ld);
  return factorise(rest, a22, ld);
}

// L (n, n) <- L^-1.
template <typename T>
void invert_triangle(int64_t n, T* l, int64_t ld) {
  if (n <= kLeaf) {
    blas::fortran_trtri('L', n, l, ld);
    return;
  }
  const int64_t half = half_of(n), rest = n - half;
  T *l21 = l + half, *l22 = l + half * (ld + 1);
  invert_triangle(half, l, ld);
  invert_triangle(rest, l22, ld);
  // -L22^-1 L21 L11^-1
  in_strips(rest, cube(rest, half, half), [&](int64_t first, int64_t rows) {
    blas::fortran_trmm('R', 'L', 'N', rows, half, T(1), l, ld, l21 + first, ld);
  });
  in_strips(half, cube(rest, rest, half), [&](int64_t first, int64_t columns) {
    blas::fortran_trmm('L', 'L', 'N', rest, columns, T(-1), l22, ld, l21 + first * ld, ld);
  });
}

// L (n, n) <- the lower triangle of L^T L.
template <typename T>
void square_triangle(int64_t n, T* l, int64_t ld) {
  if (n <= kLeaf) {
    blas::fortran_lauum('L', n, l, ld);
    return;
  }
  const int64_t half = half_of(n), rest = n - half;
  T *l21 = l + half, *l22 = l + half * (ld + 1);
  square_triangle(half, l, ld);
  rank_update(true, half, rest, T(1), l21, ld, T(1), l, ld);
  in_strips(half, cube(rest, rest, half), [&](int64_t first, int64_t columns) {
    blas::fortran_trmm('L', 'L', 'T', rest, columns, T(1), l22, ld, l21 + first * ld, ld);
  });
  square_triangle(rest, l22, ld);
}

// How a tensor's statistics S_i are rescaled and damped: U_i + eps I with U_i = per_size d_i S_i.
struct Rescaling {
  double per_size;
  double eps;
};

// Rows [first, last) of the upper triangle of `out` (n, n) <- the same columns of S's lower one.
template <typename T>
void copy_lower(const T* stat, int64_t n, int64_t first, int64_t last, T* out) {
  for (int64_t i = first; i < last; ++i) {
    for (int64_t j = i; j < last; ++j) out[i * n + j] = stat[j * n + i];
  }
  transpose(stat + last * n + first, n, out + first * n + last, n, n - last, last - first);
}

// out <- scale S (its lower triangle if the mode is full). Returns whether all entries are finite.
template <typename T>
bool rescaled(const FactorMode& mode, T scale, T* out) {
  constexpr int64_t kRows = 32;
  const T* stat = static_cast<const T*>(mode.stat);
  const int64_t rows = mode.diagonal ? 1 : mode.d;
  bool finite = true;
  for (int64_t i = 0; i < rows; ++i) {
    T* to = out + i * mode.d;
    if (mode.diagonal) {
      std::copy_n(stat, mode.d, to);
    } else if (i % kRows == 0) {
      copy_lower(stat, mode.d, i, std::min(i + kRows, rows), out);
    }
    for (int64_t j = i; j < mode.d; ++j) to[j] *= scale;
    finite = finite && all_finite(to + i, mode.d - i);
  }
  return finite;
}

// out <- the lower triangle of (scale S + eps I)^-1; false if there is none.
template <typename T>
bool invert(const FactorMode& mode, const Rescaling& rescaling, Scratch scratch) {
  T* out = static_cast<T*>(mode.out);
  const T scale = static_cast<T>(rescaling.per_size * static_cast<double>(mode.d));
  const T eps = static_cast<T>(rescaling.eps);
  const int64_t d = mode.d;
  if (d == 0) return true;
  const T noise = kPivotRoundings * std::numeric_limits<T>::epsilon();
  T* diagonal = scratch.take<T>(d);
  const bool finite = rescaled(mode, scale, out);
  if (mode.diagonal) {
    bool good = true;
    for (int64_t i = 0; i < d; ++i) {
      const T damped = out[i] + eps;
      out[i] = 1 / damped;
      good = good && damped > 0;
    }
    return good && finite && all_finite(out, d);
  }
  for (int64_t i = 0; i < d; ++i) {
    diagonal[i] = out[i * (d + 1)] += eps;
  }
  if (!finite || !factorise(d, out, d)) return false;
  for (int64_t i = 0; i < d; ++i) {
    const T pivot = out[i * (d + 1)];
    if (!(pivot * pivot > noise * diagonal[i])) return false;
  }
  invert_triangle(d, out, d);
  square_triangle(d, out, d);
  bool good = true;
  for (int64_t i = 0; i < d && good; ++i) {
    T* row = out + i * d;
    for (int64_t j = i; j < d; ++j) row[j] += 0;  // makes the BLAS's -0 a 0
    good = all_finite(row + i, d - i);
  }
  return good;
}

template <typename T>
Rescaling rescale(const TensorModes& tensor, double damping, bool relative) {
  // c = (tr S_1 / prod d)^(1/k), and c^(k-1) prod_{j != i} d_j = tr S_1 / (c d_i).
  const FactorMode& first = tensor.modes.front();
  const double trace = trace_of<T>(first);
  double size = 1;
  for (const FactorMode& mode : tensor.modes) size *= static_cast<double>(mode.d);
  if (size == 0 || counts_as_zero<T>(first, trace)) return {0, relative ? 1 : damping};
  const double root = 1 / static_cast<double>(tensor.modes.size());
  const double c = std::pow(trace, root) / std::pow(size, root);
  return {c / trace, relative ? damping * c : damping};
}

}  // namespace

void damped_inverse(const std::vector<TensorModes>& tensors, double damping, bool relative,
                    int32_t* info) {
  blas::use_one_thread_per_call();
  std::vector<Rescaling> rescalings;
  rescalings.reserve(tensors.size());
  for (const TensorModes& tensor : tensors) {
    rescalings.push_back(with_state(tensor.element, [&](auto zero) {
      return rescale<decltype(zero)>(tensor, damping, relative);
    }));
  }
  make_factors(
      tensors, 1.0,
      [](const FactorMode& mode, auto zero) { return Scratch::bytes_of<decltype(zero)>(mode.d); },
      [&](size_t t, const FactorMode& mode, auto zero, Scratch scratch) {
        return invert<decltype(zero)>(mode, rescalings[t], scratch);
      },
      info);
}

}  // namespace tnt
