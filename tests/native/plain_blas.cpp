// The BLAS and LAPACK functions that csrc/cpu/blas.h declares, as loops over their definitions, for
// the sanitized builds: compiled with them, they show the sanitizers every access of every product.
//
// Stricter than a BLAS has to be: arguments that the kernels do not use, or for which a BLAS would
// only print an error, end the program.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/blas.h"

namespace {

void require(bool holds, const char* function, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "plain BLAS: %s must have %s\n", function, what);
  std::abort();
}

// Element (i, j) of a matrix; its transpose is the same with the steps swapped.
template <typename T>
struct Matrix {
  T* data;
  int64_t row_step, column_step;

  T& operator()(int64_t i, int64_t j) const { return data[i * row_step + j * column_step]; }
};

// op(A) for (rows, columns) op(A), column-major with leading dimension ld before `op`.
template <typename T>
Matrix<T> operand(const char* function, char op, T* data, int rows, int columns, int ld) {
  require(op == 'N' || op == 'T', function, "N or T for a transposition");
  require(rows >= 0 && columns >= 0, function, "no negative sizes");
  require(ld >= std::max(1, op == 'N' ? rows : columns), function,
          "leading dimensions of at least the rows");
  if (op == 'N') return {data, 1, ld};
  return {data, ld, 1};
}

// With beta 0 what c held is not read.
template <typename T>
void blend(T& c, T alpha, T sum, T beta) {
  c = beta == 0 ? alpha * sum : alpha * sum + beta * c;
}

template <typename T>
void gemm(char op_a, char op_b, int m, int n, int k, T alpha, const T* a, int lda, const T* b,
          int ldb, T beta, T* c, int ldc) {
  const auto left = operand("gemm", op_a, a, m, k, lda);
  const auto right = operand("gemm", op_b, b, k, n, ldb);
  const auto result = operand("gemm", 'N', c, m, n, ldc);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < m; ++i) {
      T sum = 0;
      for (int l = 0; l < k; ++l) sum += left(i, l) * right(l, j);
      blend(result(i, j), alpha, sum, beta);
    }
  }
}

template <typename T>
void syrk(char uplo, char op, int n, int k, T alpha, const T* a, int lda, T beta, T* c, int ldc) {
  require(uplo == 'L' || uplo == 'U', "syrk", "L or U for a triangle");
  const auto x = operand("syrk", op, a, n, k, lda);
  const auto result = operand("syrk", 'N', c, n, n, ldc);
  for (int j = 0; j < n; ++j) {
    const int first = uplo == 'L' ? j : 0, last = uplo == 'L' ? n : j + 1;
    for (int i = first; i < last; ++i) {
      T sum = 0;
      for (int l = 0; l < k; ++l) sum += x(i, l) * x(j, l);
      blend(result(i, j), alpha, sum, beta);
    }
  }
}

// B <- alpha op(A) B, or B <- alpha B A on the right, for lower triangular A.
template <typename T>
void trmm(char side, char uplo, char op, char diag, int m, int n, T alpha, const T* a, int lda,
          T* b, int ldb) {
  require(uplo == 'L' && diag == 'N', "trmm", "L and N for a triangle and its diagonal");
  require(side == 'L' || (side == 'R' && op == 'N'), "trmm", "L, or R and N, for A's place");
  const int size = side == 'L' ? m : n;
  const auto triangle = operand("trmm", op, a, size, size, lda);
  const auto result = operand("trmm", 'N', b, m, n, ldb);
  // In place: in an order that writes each element after the last one that needs it.
  if (side == 'R') {
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < m; ++i) {
        T sum = 0;
        for (int l = j; l < n; ++l) sum += result(i, l) * triangle(l, j);
        result(i, j) = alpha * sum;
      }
    }
    return;
  }
  for (int j = 0; j < n; ++j) {
    for (int turn = 0; turn < m; ++turn) {
      const int i = op == 'N' ? m - 1 - turn : turn;
      const int first = op == 'N' ? 0 : i, last = op == 'N' ? i + 1 : m;
      T sum = 0;
      for (int l = first; l < last; ++l) sum += triangle(i, l) * result(l, j);
      result(i, j) = alpha * sum;
    }
  }
}

// B <- alpha B A^-T for lower triangular A.
template <typename T>
void trsm(char side, char uplo, char op, char diag, int m, int n, T alpha, const T* a, int lda,
          T* b, int ldb) {
  require(side == 'R' && uplo == 'L' && op == 'T' && diag == 'N', "trsm", "R, L, T and N");
  const auto triangle = operand("trsm", 'N', a, n, n, lda);
  const auto x = operand("trsm", 'N', b, m, n, ldb);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < m; ++i) {
      T rest = alpha * x(i, j);
      for (int l = 0; l < j; ++l) rest -= x(i, l) * triangle(j, l);
      x(i, j) = rest / triangle(j, j);
    }
  }
}

template <typename T>
void symv(char uplo, int n, T alpha, const T* a, int lda, const T* x, int step_x, T beta, T* y,
          int step_y) {
  require(uplo == 'U', "symv", "U for a triangle");
  require(step_x == 1 && step_y == 1, "symv", "vectors without gaps");
  const auto upper = operand("symv", 'N', a, n, n, lda);
  for (int i = 0; i < n; ++i) {
    T sum = 0;
    for (int j = 0; j < n; ++j) sum += upper(std::min(i, j), std::max(i, j)) * x[j];
    blend(y[i], alpha, sum, beta);
  }
}

// A <- L with A = L L^T; the number of the first pivot that is not positive, from 1, if any.
template <typename T>
int potrf(char uplo, int n, T* a, int lda) {
  require(uplo == 'L', "potrf", "L for a triangle");
  const auto l = operand("potrf", 'N', a, n, n, lda);
  for (int j = 0; j < n; ++j) {
    T pivot = l(j, j);
    for (int k = 0; k < j; ++k) pivot -= l(j, k) * l(j, k);
    if (!(pivot > 0)) return j + 1;  // NaN too
    l(j, j) = std::sqrt(pivot);
    for (int i = j + 1; i < n; ++i) {
      T rest = l(i, j);
      for (int k = 0; k < j; ++k) rest -= l(i, k) * l(j, k);
      l(i, j) = rest / l(j, j);
    }
  }
  return 0;
}

// L <- L^-1, its columns from the last to the first; the number of the first zero on its diagonal,
// from 1, if any.
template <typename T>
int trtri(char uplo, char diag, int n, T* a, int lda) {
  require(uplo == 'L' && diag == 'N', "trtri", "L and N for a triangle and its diagonal");
  const auto l = operand("trtri", 'N', a, n, n, lda);
  for (int j = 0; j < n; ++j) {
    if (l(j, j) == 0) return j + 1;
  }
  for (int j = n - 1; j >= 0; --j) {
    l(j, j) = 1 / l(j, j);
    for (int i = n - 1; i > j; --i) {
      T sum = 0;
      for (int k = j + 1; k <= i; ++k) sum += l(i, k) * l(k, j);
      l(i, j) = -sum * l(j, j);
    }
  }
  return 0;
}

// The lower triangle of L^T L, over L: its row i needs nothing of L above row i, and L(i, i) for
// all of its elements.
template <typename T>
int lauum(char uplo, int n, T* a, int lda) {
  require(uplo == 'L', "lauum", "L for a triangle");
  const auto l = operand("lauum", 'N', a, n, n, lda);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j <= i; ++j) {
      T sum = 0;
      for (int k = i; k < n; ++k) sum += l(k, i) * l(k, j);
      l(i, j) = sum;
    }
  }
  return 0;
}

// One step of a reduction of A, of which the upper triangle is given, to a tridiagonal matrix: the
// reflector H(i) = I - tau v v^T makes column i + 1 zero above row i. v(i) = 1, and the column
// holds v above. w = tau A v - (tau^2 / 2) (v^T A v) v, then A <- A - v w^T - w v^T.
template <typename T>
void reflect(const Matrix<T>& upper, int i, T* e, T* tau, T* w) {
  T* v = &upper(0, i + 1);
  T rest = 0;
  for (int j = 0; j < i; ++j) rest += v[j] * v[j];
  const T first = v[i], length = std::sqrt(first * first + rest);
  *e = rest == 0 ? first : first > 0 ? -length : length;
  *tau = rest == 0 ? 0 : (*e - first) / *e;
  for (int j = 0; j < i && rest != 0; ++j) v[j] /= first - *e;
  v[i] = 1;
  T product = 0;
  for (int r = 0; r <= i; ++r) {
    w[r] = 0;
    for (int c = 0; c <= i; ++c) w[r] += *tau * upper(std::min(r, c), std::max(r, c)) * v[c];
    product += w[r] * v[r];
  }
  for (int r = 0; r <= i; ++r) w[r] -= *tau / 2 * product * v[r];
  for (int c = 0; c <= i; ++c) {
    for (int r = 0; r <= c; ++r) upper(r, c) -= v[r] * w[c] + w[r] * v[c];
  }
}

template <typename T>
void sytrd(char uplo, int n, T* a, int lda, T* d, T* e, T* tau, T* work, int size) {
  require(uplo == 'U', "sytrd", "U for a triangle");
  require(size >= n, "sytrd", "a workspace of n numbers");
  const auto upper = operand("sytrd", 'N', a, n, n, lda);
  for (int i = n - 2; i >= 0; --i) reflect(upper, i, e + i, tau + i, work);
  for (int i = 0; i < n; ++i) d[i] = upper(i, i);
}

// The last columns of A as sytrd leaves them, and the vectors w of their steps. The rest of A
// stays: here the steps work on a copy.
void latrd(char uplo, int n, int columns, double* a, int lda, double* e, double* tau, double* w,
           int ldw) {
  require(uplo == 'U' && columns < n, "latrd", "U for a triangle, and a rest");
  const auto upper = operand("latrd", 'N', a, n, n, lda);
  std::vector<double> memory(static_cast<size_t>(n) * n);
  const auto copy = operand("latrd", 'N', memory.data(), n, n, n);
  for (int j = 0; j < n; ++j) std::copy_n(&upper(0, j), j + 1, &copy(0, j));
  for (int i = n - 2; i >= n - 1 - columns; --i) {
    reflect(copy, i, e + i, tau + i, w + static_cast<int64_t>(i + 1 - n + columns) * ldw);
  }
  for (int j = n - columns; j < n; ++j) std::copy_n(&copy(0, j), j + 1, &upper(0, j));
}

// C <- alpha (A B^T + B A^T) + beta C
void syr2k(char uplo, char op, int n, int k, double alpha, const double* a, int lda,
           const double* b, int ldb, double beta, double* c, int ldc) {
  require(uplo == 'U' && op == 'N', "syr2k", "U and N");
  const auto x = operand("syr2k", 'N', a, n, k, lda), y = operand("syr2k", 'N', b, n, k, ldb);
  const auto result = operand("syr2k", 'N', c, n, n, ldc);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i <= j; ++i) {
      double sum = 0;
      for (int l = 0; l < k; ++l) sum += x(i, l) * y(j, l) + y(i, l) * x(j, l);
      blend(result(i, j), alpha, sum, beta);
    }
  }
}

// C <- H C for the reflectors of sytrd.
template <typename T>
void ormtr(char side, char uplo, char op, int m, int n, const T* a, int lda, const T* tau, T* c,
           int ldc, T* work, int size) {
  require(side == 'L' && uplo == 'U' && op == 'N', "ormtr", "L, U and N");
  require(size >= 32 * n + 65 * 64, "ormtr", "the workspace of blocks of 32");
  std::fill_n(work, size, T(0));
  const auto upper = operand("ormtr", 'N', a, m, m, lda);
  const auto result = operand("ormtr", 'N', c, m, n, ldc);
  for (int i = 0; i + 1 < m; ++i) {
    for (int j = 0; j < n; ++j) {
      T sum = result(i, j);
      for (int l = 0; l < i; ++l) sum += upper(l, i + 1) * result(l, j);
      result(i, j) -= tau[i] * sum;
      for (int l = 0; l < i; ++l) result(l, j) -= tau[i] * sum * upper(l, i + 1);
    }
  }
}

// Z <- the eigenvectors of the tridiagonal matrix (d, e), d <- its ascending eigenvalues, by Jacobi
// rotations.
int stedc(char start, int n, double* d, double* e, double* z, int ldz, double* work, int size,
          int64_t* integers, int64_t count) {
  require(start == 'I', "stedc", "I for Z at the start");
  require(size >= 1 + 4 * n + n * n && count >= 3 + 5 * n, "stedc", "its workspaces");
  std::fill_n(work, size, 0.0);
  std::fill_n(integers, count, 0);
  const auto vectors = operand("stedc", 'N', z, n, n, ldz);
  const auto matrix = operand("stedc", 'N', work, n, n, n);
  double norm = 0;
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) vectors(i, j) = i == j;
    matrix(i, i) = d[i];
    if (i + 1 < n) matrix(i, i + 1) = matrix(i + 1, i) = e[i];
    norm += std::abs(d[i]) + (i + 1 < n ? std::abs(e[i]) : 0);
  }
  const auto rotate = [n](const Matrix<double>& of, int p, int q, double c,
                          double s) {  // two columns
    for (int i = 0; i < n; ++i) {
      const double x = of(i, p), y = of(i, q);
      of(i, p) = c * x - s * y;
      of(i, q) = s * x + c * y;
    }
  };
  for (bool rotated = true; rotated;) {
    rotated = false;
    for (int p = 0; p < n; ++p) {
      for (int q = p + 1; q < n; ++q) {
        const double off = matrix(p, q);
        if (std::abs(off) <= std::numeric_limits<double>::epsilon() / 16 * norm) continue;
        rotated = true;
        const double angle = std::atan2(2 * off, matrix(q, q) - matrix(p, p)) / 2;
        const double c = std::cos(angle), s = std::sin(angle);
        rotate(matrix, p, q, c, s);
        rotate({matrix.data, matrix.column_step, matrix.row_step}, p, q, c, s);
        rotate(vectors, p, q, c, s);
      }
    }
  }
  for (int i = 0; i < n; ++i) d[i] = matrix(i, i);
  for (int i = 0; i < n; ++i) {
    const int least = static_cast<int>(std::min_element(d + i, d + n) - d);
    if (least == i) continue;
    std::swap(d[i], d[least]);
    std::swap_ranges(z + i * ldz, z + i * ldz + n, z + least * ldz);
  }
  return 0;
}

}  // namespace

#define PLAIN_DEFINE(T, p)                                                                         \
  void TNT_FORTRAN(p##gemm)(const char* op_a, const char* op_b, const int64_t* m,                  \
                            const int64_t* n, const int64_t* k, const T* alpha, const T* a,        \
                            const int64_t* lda, const T* b, const int64_t* ldb, const T* beta,     \
                            T* c, const int64_t* ldc) {                                            \
    gemm(*op_a, *op_b, *m, *n, *k, *alpha, a, *lda, b, *ldb, *beta, c, *ldc);                      \
  }                                                                                                \
  void TNT_FORTRAN(p##syrk)(const char* uplo, const char* op, const int64_t* n, const int64_t* k,  \
                            const T* alpha, const T* a, const int64_t* lda, const T* beta, T* c,   \
                            const int64_t* ldc) {                                                  \
    syrk(*uplo, *op, *n, *k, *alpha, a, *lda, *beta, c, *ldc);                                     \
  }                                                                                                \
  void TNT_FORTRAN(p##trmm)(const char* side, const char* uplo, const char* op, const char* diag,  \
                            const int64_t* m, const int64_t* n, const T* alpha, const T* a,        \
                            const int64_t* lda, T* b, const int64_t* ldb) {                        \
    trmm(*side, *uplo, *op, *diag, *m, *n, *alpha, a, *lda, b, *ldb);                              \
  }                                                                                                \
  void TNT_FORTRAN(p##trsm)(const char* side, const char* uplo, const char* op, const char* diag,  \
                            const int64_t* m, const int64_t* n, const T* alpha, const T* a,        \
                            const int64_t* lda, T* b, const int64_t* ldb) {                        \
    trsm(*side, *uplo, *op, *diag, *m, *n, *alpha, a, *lda, b, *ldb);                              \
  }                                                                                                \
  void TNT_FORTRAN(p##symv)(const char* uplo, const int64_t* n, const T* alpha, const T* a,        \
                            const int64_t* lda, const T* x, const int64_t* step_x, const T* beta,  \
                            T* y, const int64_t* step_y) {                                         \
    symv(*uplo, *n, *alpha, a, *lda, x, *step_x, *beta, y, *step_y);                               \
  }                                                                                                \
  void TNT_FORTRAN(p##potrf)(const char* uplo, const int64_t* n, T* a, const int64_t* lda,         \
                             int64_t* info) {                                                      \
    *info = potrf(*uplo, *n, a, *lda);                                                             \
  }                                                                                                \
  void TNT_FORTRAN(p##trtri)(const char* uplo, const char* diag, const int64_t* n, T* a,           \
                             const int64_t* lda, int64_t* info) {                                  \
    *info = trtri(*uplo, *diag, *n, a, *lda);                                                      \
  }                                                                                                \
  void TNT_FORTRAN(p##lauum)(const char* uplo, const int64_t* n, T* a, const int64_t* lda,         \
                             int64_t* info) {                                                      \
    *info = lauum(*uplo, *n, a, *lda);                                                             \
  }                                                                                                \
  void TNT_FORTRAN(p##sytrd)(const char* uplo, const int64_t* n, T* a, const int64_t* lda, T* d,   \
                             T* e, T* tau, T* work, const int64_t* size, int64_t* info) {          \
    sytrd(*uplo, *n, a, *lda, d, e, tau, work, *size);                                             \
    *info = 0;                                                                                     \
  }                                                                                                \
  void TNT_FORTRAN(p##ormtr)(const char* side, const char* uplo, const char* op, const int64_t* m, \
                             const int64_t* n, const T* a, const int64_t* lda, const T* tau, T* c, \
                             const int64_t* ldc, T* work, const int64_t* size, int64_t* info) {    \
    ormtr(*side, *uplo, *op, *m, *n, a, *lda, tau, c, *ldc, work, *size);                          \
    *info = 0;                                                                                     \
  }

extern "C" {
PLAIN_DEFINE(float, s)
PLAIN_DEFINE(double, d)
void TNT_FORTRAN(dlatrd)(const char* uplo, const int64_t* n, const int64_t* columns, double* a,
                         const int64_t* lda, double* e, double* tau, double* w,
                         const int64_t* ldw) {
  latrd(*uplo, *n, *columns, a, *lda, e, tau, w, *ldw);
}
void TNT_FORTRAN(dsyr2k)(const char* uplo, const char* op, const int64_t* n, const int64_t* k,
                         const double* alpha, const double* a, const int64_t* lda, const double* b,
                         const int64_t* ldb, const double* beta, double* c, const int64_t* ldc) {
  syr2k(*uplo, *op, *n, *k, *alpha, a, *lda, b, *ldb, *beta, c, *ldc);
}
void TNT_FORTRAN(dstedc)(const char* start, const int64_t* n, double* d, double* e, double* z,
                         const int64_t* ldz, double* work, const int64_t* size, int64_t* integers,
                         const int64_t* count, int64_t* info) {
  *info = stedc(*start, *n, d, e, z, *ldz, work, *size, integers, *count);
}
}
