// The BLAS and LAPACK: only this file and blas.cpp call them.
//
// The default is OpenBLAS from the scipy-openblas32 package; setup.py describes how to build with
// another one. TNT_BLAS_PREFIX is the prefix of its Fortran names.
// TNT_BLAS_SET_THREADS names its function that sets the number of threads, if it has one: the
// kernels make many calls in parallel on PyTorch's threads, so each call must use one thread.
//
// General products may come from PyTorch's own library instead (blas.cpp).
//
// gemm, syrk and symv take row-major matrices and pass them to Fortran as column-major transposes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>

#include "cpu/views.h"

#ifndef TNT_BLAS_PREFIX
#define TNT_BLAS_PREFIX scipy_
#define TNT_BLAS_SET_THREADS scipy_openblas_set_num_threads
#define TNT_BLAS_CONFIG scipy_openblas_get_config
#endif

#define TNT_JOIN_NOW(prefix, name) prefix##name##_
#define TNT_JOIN(prefix, name) TNT_JOIN_NOW(prefix, name)
#define TNT_FORTRAN(name) TNT_JOIN(TNT_BLAS_PREFIX, name)

// A general product of matrices with entries of type In.
template <typename In, typename T>
using Gemm = void(const char*, const char*, const int64_t*, const int64_t*, const int64_t*,
                  const T*, const In*, const int64_t*, const In*, const int64_t*, const T*, T*,
                  const int64_t*);

// p: s for float, d for double.
#define TNT_DECLARE(T, p)                                                                       \
  void TNT_FORTRAN(p##gemm)(const char*, const char*, const int64_t*, const int64_t*,           \
                            const int64_t*, const T*, const T*, const int64_t*, const T*,       \
                            const int64_t*, const T*, T*, const int64_t*);                      \
  void TNT_FORTRAN(p##syrk)(const char*, const char*, const int64_t*, const int64_t*, const T*, \
                            const T*, const int64_t*, const T*, T*, const int64_t*);            \
  void TNT_FORTRAN(p##trmm)(const char*, const char*, const char*, const char*, const int64_t*, \
                            const int64_t*, const T*, const T*, const int64_t*, T*,             \
                            const int64_t*);                                                    \
  void TNT_FORTRAN(p##trsm)(const char*, const char*, const char*, const char*, const int64_t*, \
                            const int64_t*, const T*, const T*, const int64_t*, T*,             \
                            const int64_t*);                                                    \
  void TNT_FORTRAN(p##symv)(const char*, const int64_t*, const T*, const T*, const int64_t*,    \
                            const T*, const int64_t*, const T*, T*, const int64_t*);            \
  void TNT_FORTRAN(p##potrf)(const char*, const int64_t*, T*, const int64_t*, int64_t*);        \
  void TNT_FORTRAN(p##trtri)(const char*, const char*, const int64_t*, T*, const int64_t*,      \
                             int64_t*);                                                         \
  void TNT_FORTRAN(p##lauum)(const char*, const int64_t*, T*, const int64_t*, int64_t*);        \
  void TNT_FORTRAN(p##sytrd)(const char*, const int64_t*, T*, const int64_t*, T*, T*, T*, T*,   \
                             const int64_t*, int64_t*);                                         \
  void TNT_FORTRAN(p##ormtr)(const char*, const char*, const char*, const int64_t*,             \
                             const int64_t*, const T*, const int64_t*, const T*, T*,            \
                             const int64_t*, T*, const int64_t*, int64_t*);

extern "C" {
TNT_DECLARE(float, s)
TNT_DECLARE(double, d)
void TNT_FORTRAN(dlatrd)(const char*, const int64_t*, const int64_t*, double*, const int64_t*,
                         double*, double*, double*, const int64_t*);
void TNT_FORTRAN(dsyr2k)(const char*, const char*, const int64_t*, const int64_t*, const double*,
                         const double*, const int64_t*, const double*, const int64_t*,
                         const double*, double*, const int64_t*);
void TNT_FORTRAN(dstedc)(const char*, const int64_t*, double*, double*, double*, const int64_t*,
                         double*, const int64_t*, int64_t*, const int64_t*, int64_t*);
#ifdef TNT_BLAS_SET_THREADS
void TNT_BLAS_SET_THREADS(int);
#endif
#ifdef TNT_BLAS_CONFIG
char* TNT_BLAS_CONFIG();
#endif
}

namespace tnt::blas {

// The largest size or leading dimension that fits this BLAS's integers. They are passed with 64
// bits; a library with 32-bit ones reads and writes only the low half, which has the same value.
constexpr int64_t kMaxSize = std::numeric_limits<int>::max();

// General products.
struct Products {
  Gemm<float, float>* of_floats;
  Gemm<double, double>* of_doubles;
  // Sums in float on the processor's bfloat16 matrix units; null if it or the library has none.
  Gemm<BFloat16, float>* of_bfloat16s;
  // PyTorch's library only: sets the calling thread's number of threads (0: the process's), and
  // returns the earlier number.
  int (*set_threads)(int);
};
constexpr Products own_products{TNT_FORTRAN(sgemm), TNT_FORTRAN(dgemm), nullptr, nullptr};
// The library for products larger than kUnpackedProduct: this BLAS or PyTorch's.
inline Products products = own_products;

// Chooses `products` when the extension loads. `wanted` is "own", "torch" or empty: PyTorch's on
// Intel's processors, if it has them. Throws std::invalid_argument.
void choose_products(const std::string& wanted);

// The libraries in use, and why.
std::string description();

// Whether bfloat16 products are faster than float ones. They are used if the mode, and the rest of
// its tensor, have at least kLeastRounded entries: below, rounding costs more than it saves.
inline bool multiplies_bfloat16() { return products.of_bfloat16s != nullptr; }
constexpr int64_t kLeastRounded = 64;

// Up to this product of M, N and K, OpenBLAS has kernels for small matrices, without packing.
constexpr int64_t kUnpackedProduct = 1000000;

// Every operator begins with it: another package may have changed the number of threads.
inline void use_one_thread_per_call() {
#ifdef TNT_BLAS_SET_THREADS
  TNT_BLAS_SET_THREADS(1);
#endif
}

// While it lives, PyTorch's products use one thread.
class OneThreadPerCall {
 public:
  explicit OneThreadPerCall(const Products& of)
      : set_(of.set_threads), former_(set_ ? set_(1) : 0) {}
  ~OneThreadPerCall() {
    if (set_) set_(former_);
  }
  OneThreadPerCall(const OneThreadPerCall&) = delete;
  OneThreadPerCall& operator=(const OneThreadPerCall&) = delete;

 private:
  int (*set_)(int);
  int former_;
};

template <typename In, typename T>
void fortran_gemm(char ta, char tb, int64_t m, int64_t n, int64_t k, T alpha, const In* a,
                  int64_t lda, const In* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  const bool own =
      !std::is_same_v<In, BFloat16> && m * n <= kUnpackedProduct / std::max<int64_t>(k, 1);
  const Products& from = own ? own_products : products;
  const OneThreadPerCall one(from);
  const auto gemm =
      std::get<Gemm<In, T>*>(std::tuple(from.of_floats, from.of_doubles, from.of_bfloat16s));
  gemm(&ta, &tb, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}

// Overloads for float and double.
#define TNT_DEFINE(T, p)                                                                          \
  inline void fortran_syrk(char uplo, char trans, int64_t n, int64_t k, T alpha, const T* a,      \
                           int64_t lda, T beta, T* c, int64_t ldc) {                              \
    TNT_FORTRAN(p##syrk)(&uplo, &trans, &n, &k, &alpha, a, &lda, &beta, c, &ldc);                 \
  }                                                                                               \
  inline void fortran_trmm(char side, char uplo, char trans, int64_t m, int64_t n, T alpha,       \
                           const T* a, int64_t lda, T* b, int64_t ldb) {                          \
    const char diag = 'N';                                                                        \
    TNT_FORTRAN(p##trmm)(&side, &uplo, &trans, &diag, &m, &n, &alpha, a, &lda, b, &ldb);          \
  }                                                                                               \
  inline void fortran_trsm(char side, char uplo, char trans, int64_t m, int64_t n, T alpha,       \
                           const T* a, int64_t lda, T* b, int64_t ldb) {                          \
    const char diag = 'N';                                                                        \
    TNT_FORTRAN(p##trsm)(&side, &uplo, &trans, &diag, &m, &n, &alpha, a, &lda, b, &ldb);          \
  }                                                                                               \
  inline void fortran_symv(char uplo, int64_t n, T alpha, const T* a, int64_t lda, const T* x,    \
                           T beta, T* y) {                                                        \
    const int64_t one = 1;                                                                        \
    TNT_FORTRAN(p##symv)(&uplo, &n, &alpha, a, &lda, x, &one, &beta, y, &one);                    \
  }                                                                                               \
  inline int64_t fortran_potrf(char uplo, int64_t n, T* a, int64_t lda) {                         \
    int64_t info = 0;                                                                             \
    TNT_FORTRAN(p##potrf)(&uplo, &n, a, &lda, &info);                                             \
    return info;                                                                                  \
  }                                                                                               \
  inline int64_t fortran_trtri(char uplo, int64_t n, T* a, int64_t lda) {                         \
    const char diag = 'N';                                                                        \
    int64_t info = 0;                                                                             \
    TNT_FORTRAN(p##trtri)(&uplo, &diag, &n, a, &lda, &info);                                      \
    return info;                                                                                  \
  }                                                                                               \
  inline int64_t fortran_lauum(char uplo, int64_t n, T* a, int64_t lda) {                         \
    int64_t info = 0;                                                                             \
    TNT_FORTRAN(p##lauum)(&uplo, &n, a, &lda, &info);                                             \
    return info;                                                                                  \
  }                                                                                               \
  inline void fortran_sytrd(char uplo, int64_t n, T* a, int64_t lda, T* d, T* e, T* tau, T* work, \
                            int64_t size) {                                                       \
    int64_t info = 0;                                                                             \
    TNT_FORTRAN(p##sytrd)(&uplo, &n, a, &lda, d, e, tau, work, &size, &info);                     \
  }                                                                                               \
  inline void fortran_ormtr(char uplo, int64_t m, int64_t n, const T* a, int64_t lda,             \
                            const T* tau, T* c, int64_t ldc, T* work, int64_t size) {             \
    const char side = 'L', trans = 'N';                                                           \
    int64_t info = 0;                                                                             \
    TNT_FORTRAN(p##ormtr)(&side, &uplo, &trans, &m, &n, a, &lda, tau, c, &ldc, work, &size,       \
                          &info);                                                                 \
  }

TNT_DEFINE(float, s)
TNT_DEFINE(double, d)

inline void fortran_latrd(char uplo, int64_t n, int64_t columns, double* a, int64_t lda, double* e,
                          double* tau, double* w, int64_t ldw) {
  TNT_FORTRAN(dlatrd)(&uplo, &n, &columns, a, &lda, e, tau, w, &ldw);
}

inline void fortran_syr2k(char uplo, int64_t n, int64_t k, double alpha, const double* a,
                          int64_t lda, const double* b, int64_t ldb, double beta, double* c,
                          int64_t ldc) {
  const char trans = 'N';
  TNT_FORTRAN(dsyr2k)(&uplo, &trans, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}

inline int64_t fortran_stedc(int64_t n, double* d, double* e, double* z, int64_t ldz, double* work,
                             int64_t size, int64_t* integers, int64_t count) {
  const char start = 'I';
  int64_t info = 0;
  TNT_FORTRAN(dstedc)(&start, &n, d, e, z, &ldz, work, &size, integers, &count, &info);
  return info;
}

// The operand of a product that is stored transposed. Never both: OpenBLAS 0.3.34's AVX-512 float
// kernel for small products of two transposed operands keeps the result's leading dimension in
// static memory, so that one thread may write to another's addresses.
enum class Transposed { kFirst, kSecond };

// C (m, n) <- alpha A B + beta C, for A (m, k) and B (k, n). If beta is 0, C is not read.
template <typename In, typename T>
void gemm(Transposed operand, int64_t m, int64_t n, int64_t k, T alpha, const In* a, int64_t lda,
          const In* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  fortran_gemm(operand == Transposed::kSecond ? 'T' : 'N',
               operand == Transposed::kFirst ? 'T' : 'N', n, m, k, alpha, b, ldb, a, lda, beta, c,
               ldc);
}

// Lower triangle of C (n, n) <- alpha X X^T + beta C for X (n, k), or X^T (k, n) if transposed.
template <typename T>
void syrk(bool transposed, int64_t n, int64_t k, T alpha, const T* x, int64_t ldx, T beta, T* c,
          int64_t ldc) {
  fortran_syrk('U', transposed ? 'N' : 'T', n, k, alpha, x, ldx, beta, c, ldc);
}

// y <- alpha A x + beta y for symmetric A (n, n).
template <typename T>
void symv(int64_t n, T alpha, const T* a, const T* x, T beta, T* y) {
  fortran_symv('U', n, alpha, a, n, x, beta, y);
}

}  // namespace tnt::blas
