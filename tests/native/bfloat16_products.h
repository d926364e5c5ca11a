// Products of bfloat16 numbers by loops: the kernels then round on any processor.
#pragma once

#include "cpu/blas.h"

inline void multiply_bfloat16s(const char* op_a, const char* op_b, const int64_t* m,
                               const int64_t* n, const int64_t* k, const float* alpha,
                               const tnt::BFloat16* a, const int64_t* lda, const tnt::BFloat16* b,
                               const int64_t* ldb, const float* beta, float* c,
                               const int64_t* ldc) {
  for (int64_t j = 0; j < *n; ++j) {
    for (int64_t i = 0; i < *m; ++i) {
      float sum = 0;
      for (int64_t l = 0; l < *k; ++l) {
        sum += tnt::convert<float>(a[*op_a == 'N' ? i + l * *lda : l + i * *lda]) *
               tnt::convert<float>(b[*op_b == 'N' ? l + j * *ldb : j + l * *ldb]);
      }
      float& value = c[i + j * *ldc];
      value = *beta == 0 ? *alpha * sum : *alpha * sum + *beta * value;
    }
  }
}

// While it lives, the kernels use them.
class BFloat16Products {
 public:
  BFloat16Products() : former_(tnt::blas::products) {
    tnt::blas::products.of_bfloat16s = multiply_bfloat16s;
  }
  ~BFloat16Products() { tnt::blas::products = former_; }
  BFloat16Products(const BFloat16Products&) = delete;
  BFloat16Products& operator=(const BFloat16Products&) = delete;

 private:
  tnt::blas::Products former_;
};
