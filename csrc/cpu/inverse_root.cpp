#include "cpu/inverse_root.h"

#include "cpu/blas.h"

namespace tnt {
namespace {

// C <- A B for symmetric A and B that commute, so that C is symmetric: one triangle is computed and
// mirrored. C must not overlap A or B.
template <typename T>
void symmetric_product(int64_t n, const T* a, const T* b, T* c) {
  // Strips of rows up to the diagonal: 8 strips take 9/16 of the flops of a whole product.
  const int64_t strip = std::clamp<int64_t>((n / 8 + 15) / 16 * 16, 64, 512);
  const int64_t strips = (n + strip - 1) / strip;
  const double flops = static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
  run_tasks(strips, flops, [&](int64_t task, Scratch&) {
    const int64_t first = (strips - 1 - task) * strip;  // the longest first
    const int64_t rows = std::min(strip, n - first);
    // A is symmetric, and small products are faster with A as a transpose.
    if (n <= 64) {
      blas::gemm(blas::Transposed::kFirst, rows, first + rows, n, T(1), a + first, n, b, n, T(0),
                 c + first * n, n);
    } else {
      blas::gemm(blas::Transposed::kNone, rows, first + rows, n, T(1), a + first * n, n, b, n, T(0),
                 c + first * n, n);
    }
  });
  mirror_lower(c, n, n);
}

// The largest |entry| of matrix - shift I; NaN counts as the largest.
template <typename T>
double largest(const T* matrix, int64_t n, T shift) {
  T most = 0;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const T size = std::abs(matrix[r * n + c] - (r == c ? shift : T(0)));
      if (!(size <= most)) most = size;
      if (most != most) return static_cast<double>(most);
    }
  }
  return static_cast<double>(most);
}

template <typename T>
bool root_of_diagonal(const T* stat, int64_t d, T eps, T exponent, T* out) {
  bool good = true;
  for (int64_t i = 0; i < d; ++i) {
    const T damped = stat[i] + eps;
    out[i] = std::pow(damped, exponent);
    good = good && damped > 0 && std::isfinite(damped);
  }
  return good && all_finite(out, d);
}

// The workspace is seven matrices: M, H, N, and four for powers of N and their products.
template <typename T>
bool root(const FactorMode& mode, T eps, int64_t p, Scratch& scratch) {
  const T* stat = static_cast<const T*>(mode.stat);
  T* out = static_cast<T*>(mode.out);
  const int64_t n = mode.d, count = n * n;
  const T power = static_cast<T>(-1.0 / static_cast<double>(p));
  if (mode.diagonal) return root_of_diagonal(stat, n, eps, power, out);
  if (n == 0) return true;
  T* memory = scratch.get<T>(7 * count);
  T *m = memory, *h = m + count, *step = h + count;
  T *x = step + count, *y = x + count, *next = y + count, *other = next + count;

  // The squares of the Frobenius norm would leave float's range without this scaling.
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < n; ++c) m[r * n + c] = stat[r * n + c] + (r == c ? eps : T(0));
  }
  const T most = static_cast<T>(largest(m, n, T(0)));
  double squares = 0;
  for (int64_t e = 0; e < count; ++e) {
    m[e] /= most;
    squares += static_cast<double>(m[e]) * static_cast<double>(m[e]);
  }
  const double z = static_cast<double>(1 + p) / (2 * std::sqrt(squares));
  for (int64_t e = 0; e < count; ++e) m[e] *= static_cast<T>(z);
  std::fill_n(h, count, T(0));
  const T start = static_cast<T>(std::pow(z, 1 / static_cast<double>(p)));
  for (int64_t i = 0; i < n; ++i) h[i * (n + 1)] = start;

  double error = largest(m, n, T(1));
  for (int iteration = 0; iteration < kNewtonIterations && error > kNewtonTolerance; ++iteration) {
    // N = (1 + 1/p) I - M/p; M <- N^p M; H <- H N.
    for (int64_t e = 0; e < count; ++e) step[e] = power * m[e];
    for (int64_t i = 0; i < n; ++i) step[i * (n + 1)] += 1 - power;
    // N^p M by repeated squaring: `square` is N^(2^bit), and `product` is M times the powers of p's
    // bits so far.
    const T* square = step;
    T* squares_in[2] = {x, y};
    const T* product = m;
    T* products_in[2] = {next, other};
    for (int64_t bits = p, squarings = 0, products = 0; bits > 0; bits >>= 1) {
      if (bits & 1) {
        T* target = products_in[products++ % 2];
        symmetric_product(n, square, product, target);
        product = target;
      }
      if (bits > 1) {
        T* target = squares_in[squarings++ % 2];
        symmetric_product(n, square, square, target);
        square = target;
      }
    }
    const double next_error = largest(product, n, T(1));
    // max|M - I| may grow in the first iteration, which brings eigenvalues above 1 below it. Later
    // growth means rounding or a negative eigenvalue, and the previous iterate stands.
    if (iteration > 0 && next_error > kNewtonGrowth * error) break;
    std::copy_n(product, count, m);
    symmetric_product(n, h, step, x);
    std::swap(h, x);
    error = next_error;
  }
  const T unscale = std::pow(most, power);
  for (int64_t e = 0; e < count; ++e) h[e] *= unscale;
  for (int64_t i = 0; i < n; ++i) std::copy(h + i * n + i, h + (i + 1) * n, out + i * n + i);
  const double converged = std::min(kNewtonConverged, kNewtonTrace / static_cast<double>(n));
  return error < converged && all_finite(h, count);
}

}  // namespace

void inverse_root(const std::vector<TensorModes>& tensors, double damping,
                  const std::vector<int64_t>& roots, int32_t* info) {
  make_factors(
      tensors, 40.0,
      [&](int64_t t, int64_t i, Scratch& scratch) {
        const TensorModes& tensor = tensors[static_cast<size_t>(t)];
        return with_state(tensor.element, [&](auto zero) {
          using T = decltype(zero);
          return root<T>(tensor.modes[static_cast<size_t>(i)], static_cast<T>(damping),
                         roots[static_cast<size_t>(t)], scratch);
        });
      },
      info);
}

}  // namespace tnt
