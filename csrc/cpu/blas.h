// The only file that knows the BLAS and LAPACK.
//
// By default OpenBLAS as the scipy-openblas32 package ships it; setup.py and CMakeLists.txt say
// how to build against another one. TNT_BLAS_PREFIX is what its Fortran names begin with, and
// TNT_BLAS_SET_THREADS names its function for the number of threads, where it has its own: the
// kernels run many calls side by side on PyTorch's threads, so each call must stay on one.
//
// Matrices here are row-major. Fortran's are column-major, so each row-major matrix goes down as
// its transpose; the functions below turn the arguments round.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#ifndef TNT_BLAS_PREFIX
#define TNT_BLAS_PREFIX scipy_
#define TNT_BLAS_SET_THREADS scipy_openblas_set_num_threads
#define TNT_BLAS_CONFIG scipy_openblas_get_config
#endif

#define TNT_JOIN_NOW(prefix, name) prefix##name##_
#define TNT_JOIN(prefix, name) TNT_JOIN_NOW(prefix, name)
#define TNT_FORTRAN(name) TNT_JOIN(TNT_BLAS_PREFIX, name)

// s: float's name, d: double's.
#define TNT_DECLARE(T, p)                                                                         \
  void TNT_FORTRAN(p##gemm)(const char*, const char*, const int*, const int*, const int*,         \
                            const T*, const T*, const int*, const T*, const int*, const T*, T*,   \
                            const int*);                                                          \
  void TNT_FORTRAN(p##syrk)(const char*, const char*, const int*, const int*, const T*, const T*, \
                            const int*, const T*, T*, const int*);                                \
  void TNT_FORTRAN(p##trmm)(const char*, const char*, const char*, const char*, const int*,       \
                            const int*, const T*, const T*, const int*, T*, const int*);          \
  void TNT_FORTRAN(p##trsm)(const char*, const char*, const char*, const char*, const int*,       \
                            const int*, const T*, const T*, const int*, T*, const int*);          \
  void TNT_FORTRAN(p##symv)(const char*, const int*, const T*, const T*, const int*, const T*,    \
                            const int*, const T*, T*, const int*);                                \
  void TNT_FORTRAN(p##potrf)(const char*, const int*, T*, const int*, int*);                      \
  void TNT_FORTRAN(p##trtri)(const char*, const char*, const int*, T*, const int*, int*);         \
  void TNT_FORTRAN(p##lauum)(const char*, const int*, T*, const int*, int*);

extern "C" {
TNT_DECLARE(float, s)
TNT_DECLARE(double, d)
#ifdef TNT_BLAS_SET_THREADS
void TNT_BLAS_SET_THREADS(int);
#endif
#ifdef TNT_BLAS_CONFIG
char* TNT_BLAS_CONFIG();
#endif
}

namespace tnt::blas {

// The largest size or leading dimension this BLAS's 32-bit integers can name.
constexpr int64_t kMaxSize = std::numeric_limits<int>::max();

// OpenBLAS multiplies matrices up to this product of the three sizes by kernels that do not pack
// them first, and so lose nothing on small ones.
constexpr int64_t kUnpackedProduct = 1000000;

inline std::string name() {
#ifdef TNT_BLAS_CONFIG
  return TNT_BLAS_CONFIG();
#else
  return "set at build time";
#endif
}

// Called once, when the extension is loaded.
inline void use_one_thread_per_call() {
#ifdef TNT_BLAS_SET_THREADS
  TNT_BLAS_SET_THREADS(1);
#endif
}

// What the overloads below hide: s or d.
#define TNT_DEFINE(T, p)                                                                        \
  inline void fortran_gemm(char ta, char tb, int m, int n, int k, T alpha, const T* a, int lda, \
                           const T* b, int ldb, T beta, T* c, int ldc) {                        \
    TNT_FORTRAN(p##gemm)(&ta, &tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);       \
  }                                                                                             \
  inline void fortran_syrk(char uplo, char trans, int n, int k, T alpha, const T* a, int lda,   \
                           T beta, T* c, int ldc) {                                             \
    TNT_FORTRAN(p##syrk)(&uplo, &trans, &n, &k, &alpha, a, &lda, &beta, c, &ldc);               \
  }                                                                                             \
  inline void fortran_trmm(char side, char uplo, char trans, int m, int n, T alpha, const T* a, \
                           int lda, T* b, int ldb) {                                            \
    const char diag = 'N';                                                                      \
    TNT_FORTRAN(p##trmm)(&side, &uplo, &trans, &diag, &m, &n, &alpha, a, &lda, b, &ldb);        \
  }                                                                                             \
  inline void fortran_trsm(char side, char uplo, char trans, int m, int n, T alpha, const T* a, \
                           int lda, T* b, int ldb) {                                            \
    const char diag = 'N';                                                                      \
    TNT_FORTRAN(p##trsm)(&side, &uplo, &trans, &diag, &m, &n, &alpha, a, &lda, b, &ldb);        \
  }                                                                                             \
  inline void fortran_symv(char uplo, int n, T alpha, const T* a, int lda, const T* x, T beta,  \
                           T* y) {                                                              \
    const int one = 1;                                                                          \
    TNT_FORTRAN(p##symv)(&uplo, &n, &alpha, a, &lda, x, &one, &beta, y, &one);                  \
  }                                                                                             \
  inline int fortran_potrf(char uplo, int n, T* a, int lda) {                                   \
    int info = 0;                                                                               \
    TNT_FORTRAN(p##potrf)(&uplo, &n, a, &lda, &info);                                           \
    return info;                                                                                \
  }                                                                                             \
  inline int fortran_trtri(char uplo, int n, T* a, int lda) {                                   \
    const char diag = 'N';                                                                      \
    int info = 0;                                                                               \
    TNT_FORTRAN(p##trtri)(&uplo, &diag, &n, a, &lda, &info);                                    \
    return info;                                                                                \
  }                                                                                             \
  inline int fortran_lauum(char uplo, int n, T* a, int lda) {                                   \
    int info = 0;                                                                               \
    TNT_FORTRAN(p##lauum)(&uplo, &n, a, &lda, &info);                                           \
    return info;                                                                                \
  }

TNT_DEFINE(float, s)
TNT_DEFINE(double, d)

// Which operand of a product lies in memory as its transpose. Never both: of OpenBLAS 0.3.34's
// float kernels for small products on AVX-512, the one for two transposed operands keeps the
// result's stride in static memory, so that one thread's result can land at another's addresses.
enum class Transposed { kNone, kFirst, kSecond };

// C (m, n) <- alpha A B + beta C, for A (m, k) and B (k, n). With beta 0, C is not read.
template <typename T>
void gemm(Transposed operand, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t lda,
          const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  fortran_gemm(operand == Transposed::kSecond ? 'T' : 'N',
               operand == Transposed::kFirst ? 'T' : 'N', static_cast<int>(n), static_cast<int>(m),
               static_cast<int>(k), alpha, b, static_cast<int>(ldb), a, static_cast<int>(lda), beta,
               c, static_cast<int>(ldc));
}

// The lower triangle of C (n, n) <- alpha X X^T + beta C, for X (n, k), or X^T (k, n) in memory if
// transposed.
template <typename T>
void syrk(bool transposed, int64_t n, int64_t k, T alpha, const T* x, int64_t ldx, T beta, T* c,
          int64_t ldc) {
  fortran_syrk('U', transposed ? 'N' : 'T', static_cast<int>(n), static_cast<int>(k), alpha, x,
               static_cast<int>(ldx), beta, c, static_cast<int>(ldc));
}

// y <- alpha A x + beta y for symmetric A (n, n).
template <typename T>
void symv(int64_t n, T alpha, const T* a, const T* x, T beta, T* y) {
  fortran_symv('U', static_cast<int>(n), alpha, a, static_cast<int>(n), x, beta, y);
}

}  // namespace tnt::blas
