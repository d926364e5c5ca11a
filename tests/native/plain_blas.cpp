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

}  // namespace

#define PLAIN_DEFINE(T, p)                                                                        \
  void TNT_FORTRAN(p##gemm)(const char* op_a, const char* op_b, const int* m, const int* n,       \
                            const int* k, const T* alpha, const T* a, const int* lda, const T* b, \
                            const int* ldb, const T* beta, T* c, const int* ldc) {                \
    gemm(*op_a, *op_b, *m, *n, *k, *alpha, a, *lda, b, *ldb, *beta, c, *ldc);                     \
  }                                                                                               \
  void TNT_FORTRAN(p##syrk)(const char* uplo, const char* op, const int* n, const int* k,         \
                            const T* alpha, const T* a, const int* lda, const T* beta, T* c,      \
                            const int* ldc) {                                                     \
    syrk(*uplo, *op, *n, *k, *alpha, a, *lda, *beta, c, *ldc);                                    \
  }                                                                                               \
  void TNT_FORTRAN(p##trmm)(const char* side, const char* uplo, const char* op, const char* diag, \
                            const int* m, const int* n, const T* alpha, const T* a,               \
                            const int* lda, T* b, const int* ldb) {                               \
    trmm(*side, *uplo, *op, *diag, *m, *n, *alpha, a, *lda, b, *ldb);                             \
  }                                                                                               \
  void TNT_FORTRAN(p##trsm)(const char* side, const char* uplo, const char* op, const char* diag, \
                            const int* m, const int* n, const T* alpha, const T* a,               \
                            const int* lda, T* b, const int* ldb) {                               \
    trsm(*side, *uplo, *op, *diag, *m, *n, *alpha, a, *lda, b, *ldb);                             \
  }                                                                                               \
  void TNT_FORTRAN(p##symv)(const char* uplo, const int* n, const T* alpha, const T* a,           \
                            const int* lda, const T* x, const int* step_x, const T* beta, T* y,   \
                            const int* step_y) {                                                  \
    symv(*uplo, *n, *alpha, a, *lda, x, *step_x, *beta, y, *step_y);                              \
  }                                                                                               \
  void TNT_FORTRAN(p##potrf)(const char* uplo, const int* n, T* a, const int* lda, int* info) {   \
    *info = potrf(*uplo, *n, a, *lda);                                                            \
  }                                                                                               \
  void TNT_FORTRAN(p##trtri)(const char* uplo, const char* diag, const int* n, T* a,              \
                             const int* lda, int* info) {                                         \
    *info = trtri(*uplo, *diag, *n, a, *lda);                                                     \
  }                                                                                               \
  void TNT_FORTRAN(p##lauum)(const char* uplo, const int* n, T* a, const int* lda, int* info) {   \
    *info = lauum(*uplo, *n, a, *lda);                                                            \
  }

extern "C" {
PLAIN_DEFINE(float, s)
PLAIN_DEFINE(double, d)
}
