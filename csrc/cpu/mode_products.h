// Tensors times a factor in every mode. Ren & Goldfarb 2021, equation 10.
#pragma once

#include <vector>

#include "cpu/chain.h"
#include "cpu/views.h"

namespace tnt {

// G, its factors, and the product: contiguous, double for a double G, else float.
struct ModeProduct {
  TensorView tensor;
  std::vector<Factor> factors;
  void* out;
};

// out <- G x_1 A_1 ... x_k A_k for every tensor. `rounded`: as chain_product.
void mode_products(const std::vector<ModeProduct>& products, bool rounded);

}  // namespace tnt
