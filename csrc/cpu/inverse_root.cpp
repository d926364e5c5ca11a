#include "cpu/operators.h"
#include "cpu/strips.h"

namespace tnt {
namespace {

// How many columns of a float matrix are reduced in double before the rest is reduced in float.
// Small matrices are reduced in double as a whole.
constexpr int64_t kPanel = 16;

template <typename T>
bool root_of_diagonal(const FactorMode& mode, T eps, T exponent) {
  const T *stat = static_cast<const T*>(mode.stat), shift = static_cast<T>(mode.shift);
  T* out = static_cast<T*>(mode.out);
  const int64_t d = mode.d;
  bool good = true;
  for (int64_t i = 0; i < d; ++i) {
    const T damped = stat[i] + shift + eps;
    out[i] = std::pow(damped, exponent);
    good = good && damped > 0 && std::isfinite(damped);
  }
  return good && all_finite(out, d);
}

// An eigendecomposition of a symmetric matrix (n, n): H Z diag(values) Z^T H^T, where H is the
// product of LAPACK's reflectors. Matrices are column-major, and only their upper triangles are
// used (row-major, the lower ones).
//
// Rounding H and the products to float adds little error to a root. Rounding the eigenvalues adds
// an error that grows with the condition number. So the tridiagonal matrix and its eigenvalues are
// in double, and kPanel columns are reduced in double: if the spectrum is steep, this removes the
// large eigenvalues from the rest of the matrix, whose roundings in float become small. At n = 784
// and eigenvalues i^-1.5 the root's error is 2e-6 instead of 4e-4 (all in float); all in double
// would take 1.15 times as long.
template <typename T>
struct Eigen {
  Eigen(int64_t n, Scratch scratch)
      : n(n),
        ld(leading_dimension(n)),
        size(size_of(n)),
        vectors(scratch.take<double>(n * ld)),
        work(scratch.take<double>(size)),
        values(scratch.take<double>(3 * n)),
        off_diagonal(values + n),
        reflectors(scratch.take<T>(n * ld)),
        tau(scratch.take<T>(3 * n)),
        integers(scratch.take<int64_t>(integers_of(n))),
        rest_of_scratch(scratch) {}

  // What the constructor and transform() take of a scratch.
  static size_t bytes(int64_t n) {
    const int64_t ld = leading_dimension(n), threads = parallelism();
    return Scratch::bytes_of<double>(n * ld) + Scratch::bytes_of<double>(size_of(n)) +
           Scratch::bytes_of<double>(3 * n) + Scratch::bytes_of<T>(n * ld) +
           Scratch::bytes_of<T>(3 * n) + Scratch::bytes_of<int64_t>(integers_of(n)) +
           static_cast<size_t>(threads) * Scratch::bytes_of<T>(transformed(share_of(n, threads)));
  }

  // A leading dimension that is a multiple of 64 maps columns to the same cache lines: n = 512 took
  // as long as 560.
  static int64_t leading_dimension(int64_t n) { return n % 64 == 0 ? n + 8 : n; }
  static int64_t size_of(int64_t n) { return 1 + 4 * n + n * leading_dimension(n); }
  static int64_t integers_of(int64_t n) { return 3 + 5 * n; }
  static int64_t share_of(int64_t n, int64_t threads) { return (n + threads - 1) / threads; }
  // LAPACK's workspace for this number of columns in transform(): it takes blocks of 32.
  static int64_t transformed(int64_t columns) { return 32 * columns + 65 * 64; }

  // Decomposes the matrix in `vectors`; all but its first `rest` rows and columns are reduced in
  // double. `values` ascend, `vectors` becomes Z, `noise` bounds the error of a value. False if
  // LAPACK does not converge.
  bool decompose(int64_t rest) {
    double* matrix = vectors;
    double* double_tau = off_diagonal + n;
    if (rest == 0) {
      blas::fortran_sytrd('U', n, matrix, ld, values, off_diagonal, double_tau, work, size);
    } else {
      const int64_t panel = n - rest;
      blas::fortran_latrd('U', n, panel, matrix, ld, off_diagonal, double_tau, work, n);
      blas::fortran_syr2k('U', rest, panel, -1, matrix + rest * ld, ld, work, n, 1, matrix, ld);
      for (int64_t i = rest; i < n; ++i) values[i] = matrix[i * (ld + 1)];
    }
    for (int64_t i = 0; i < n; ++i) std::copy_n(matrix + i * ld, i + 1, reflectors + i * ld);
    std::copy_n(double_tau, n, tau);
    double largest = 0;  // row sum of the rest: bounds its eigenvalues
    if (rest > 0) {
      T *d = tau + n, *e = d + n;
      blas::fortran_sytrd('U', rest, reflectors, ld, d, e, tau, reinterpret_cast<T*>(work), size);
      std::copy_n(d, rest, values);
      std::copy_n(e, rest - 1, off_diagonal);
      for (int64_t i = 0; i < rest; ++i) {
        const double before = i > 0 ? std::abs(off_diagonal[i - 1]) : 0;
        const double after = i + 1 < rest ? std::abs(off_diagonal[i]) : 0;
        largest = std::max(largest, before + std::abs(values[i]) + after);
      }
    }
    const bool converged = blas::fortran_stedc(n, values, off_diagonal, vectors, ld, work, size,
                                               integers, integers_of(n)) == 0;
    noise = roundings() * (std::numeric_limits<T>::epsilon() * largest +
                           std::numeric_limits<double>::epsilon() * spectral_norm());
    return converged;
  }

  double spectral_norm() const { return std::max(std::abs(values[0]), std::abs(values[n - 1])); }
  double roundings() const { return kEigenvalueRoundings * std::sqrt(static_cast<double>(n)); }

  // B <- H B
  void transform(T* b) const {
    const int64_t columns = share_of(n, parallelism());
    const int64_t tasks = (n + columns - 1) / columns;
    run_tasks(tasks, cube(n, n, n), rest_of_scratch, [&](int64_t task, Scratch scratch) {
      const int64_t first = task * columns, count = std::min(columns, n - first);
      const int64_t own = transformed(count);
      blas::fortran_ormtr('U', n, count, reflectors, ld, tau, b + first * ld, ld,
                          scratch.take<T>(own), own);
    });
  }

  int64_t n, ld, size;
  double *vectors, *work, *values, *off_diagonal, noise = 0;
  T *reflectors, *tau;
  int64_t* integers;
  Scratch rest_of_scratch;
};

// `rest` as in decompose. False if there is no root, or if reducing the rest in float hides it.
template <typename T>
bool root_of_matrix(const FactorMode& mode, T eps, int64_t p, int64_t rest, Scratch scratch) {
  const T *stat = static_cast<const T*>(mode.stat), shift = static_cast<T>(mode.shift);
  T* out = static_cast<T*>(mode.out);
  const int64_t n = mode.d;
  if (!std::isfinite(shift)) return false;
  T most = eps;
  for (int64_t r = 0; r < n; ++r) {
    if (!all_finite(stat + r * n, r + 1)) return false;
    for (int64_t c = 0; c < r; ++c) most = std::max(most, std::abs(stat[r * n + c]));
    most = std::max(most, std::abs(stat[r * n + r] + shift));
  }
  if (!(most > 0) || !std::isfinite(most)) return false;
  // Squares of entries could leave the range, so scale; a power of two scales without rounding.
  const T unit = std::ldexp(T(1), std::ilogb(most));
  Eigen<T> eigen(n, scratch);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < r; ++c) eigen.vectors[r * eigen.ld + c] = stat[r * n + c] / unit;
    eigen.vectors[r * eigen.ld + r] = (stat[r * n + r] + shift) / unit;
  }
  if (!eigen.decompose(rest)) return false;

  const double damping = static_cast<double>(eps) / static_cast<double>(unit);
  const double power = -0.5 / static_cast<double>(p);
  const double unscale = std::pow(static_cast<double>(unit), power);
  const double own_noise =
      eigen.roundings() * std::numeric_limits<T>::epsilon() * eigen.spectral_norm();
  const auto damped = [&](int64_t i) {
    const double value = eigen.values[i];
    return (value >= -own_noise && value <= eigen.noise ? 0 : value) + damping;
  };
  if (!(damped(0) > eigen.noise)) return false;

  // A = B B^T with B = H Z diag(values + damping)^(-1/2p).
  T* b = reinterpret_cast<T*>(eigen.work);
  for (int64_t j = 0; j < n; ++j) {
    const double scale = unscale * std::pow(damped(j), power);
    const double* from = eigen.vectors + j * eigen.ld;
    T* to = b + j * eigen.ld;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(scale * from[i]);
  }
  eigen.transform(b);
  rank_update(false, n, n, T(1), b, eigen.ld, T(0), out, n);
  bool good = true;
  for (int64_t i = 0; i < n && good; ++i) good = all_finite(out + i * (n + 1), n - i);
  return good;
}

template <typename T>
bool root(const FactorMode& mode, T eps, int64_t p, Scratch scratch) {
  const int64_t n = mode.d;
  if (mode.diagonal) {
    return root_of_diagonal(mode, eps, static_cast<T>(-1.0 / static_cast<double>(p)));
  }
  if (n == 0) return true;
  const bool mixed = std::is_same_v<T, float> && n > 4 * kPanel;
  return (mixed && root_of_matrix(mode, eps, p, n - kPanel, scratch)) ||
         root_of_matrix(mode, eps, p, 0, scratch);
}

// damping tr(S) / d of a statistic S, or 1 if S counts as zero.
template <typename T>
double relative_damping(const FactorMode& mode, double damping) {
  const double trace = trace_of<T>(mode);
  return counts_as_zero<T>(mode, trace) ? 1 : damping * (trace / static_cast<double>(mode.d));
}

}  // namespace

void inverse_root(std::vector<TensorModes> tensors, double damping, bool relative,
                  const std::vector<int64_t>& roots, int32_t* info) {
  blas::use_one_thread_per_call();
  const double eps = relative ? 0 : damping;
  if (relative) {
    for (TensorModes& tensor : tensors) {
      with_state(tensor.element, [&](auto zero) {
        using T = decltype(zero);
        for (FactorMode& mode : tensor.modes) mode.shift = relative_damping<T>(mode, damping);
      });
    }
  }
  make_factors(
      tensors, 40.0,
      [](const FactorMode& mode, auto zero) {
        return mode.diagonal ? 0 : Eigen<decltype(zero)>::bytes(mode.d);
      },
      [&](size_t t, const FactorMode& mode, auto zero, Scratch scratch) {
        return root(mode, static_cast<decltype(zero)>(eps), roots[t], scratch);
      },
      info);
}

}  // namespace tnt
