// The only file that knows the BLAS: the one inside PyTorch (MKL), whose Fortran symbols
// libtorch_cpu exports on x86-64 Linux. It runs on PyTorch's own threads.
#pragma once

#include <ATen/Version.h>

#include <cstdint>
#include <limits>
#include <string>

extern "C" {
void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
            const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
            const float* beta, float* c, const int* ldc);
void dgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
            const double* alpha, const double* a, const int* lda, const double* b, const int* ldb,
            const double* beta, double* c, const int* ldc);
}

namespace tnt::blas {

// The largest size or leading dimension this BLAS's 32-bit integers can name.
constexpr int64_t kMaxSize = std::numeric_limits<int>::max();

inline std::string name() { return at::get_mkl_version(); }

// C <- alpha X X^T + beta C for the symmetric row-major C (d, d). X is (d, columns), given
// row-major as it is, or, if transposed, row-major as X^T (columns, d). With beta 0, C is not read.
inline void gram(bool transposed, int64_t d, int64_t columns, float alpha, const float* x,
                 float beta, float* c) {
  const char first = transposed ? 'N' : 'T', second = transposed ? 'T' : 'N';
  const int n = static_cast<int>(d), k = static_cast<int>(columns), ld = transposed ? n : k;
  sgemm_(&first, &second, &n, &n, &k, &alpha, x, &ld, x, &ld, &beta, c, &n);
}

inline void gram(bool transposed, int64_t d, int64_t columns, double alpha, const double* x,
                 double beta, double* c) {
  const char first = transposed ? 'N' : 'T', second = transposed ? 'T' : 'N';
  const int n = static_cast<int>(d), k = static_cast<int>(columns), ld = transposed ? n : k;
  dgemm_(&first, &second, &n, &n, &k, &alpha, x, &ld, x, &ld, &beta, c, &n);
}

}  // namespace tnt::blas
