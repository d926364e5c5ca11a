// Tensors multiplied in every mode by its factor. Ren & Goldfarb 2021, equation 10.
#pragma once

#include <vector>

#include "cpu/chain.h"
#include "cpu/views.h"

namespace tnt {

// G, its factors, and where the product goes: contiguous, double where G is double, else float.
struct ModeProduct {
  TensorView tensor;
  std::vector<Factor> factors;
  void* out;
};

// out <- G x_1 A_1 ... x_k A_k for every tensor given.
void mode_products(const std::vector<ModeProduct>& products);

}  // namespace tnt
