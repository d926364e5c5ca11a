// Momentum, preconditioning, weight decay and update in one call. Ren & Goldfarb 2021, Algorithm 2.
#pragma once

#include <vector>

#include "cpu/chain.h"
#include "cpu/views.h"

namespace tnt {

// Writes W and m. m is double for a double W, else float; the factors have m's type.
struct ParameterStep {
  TensorView param;
  TensorView momentum;
  TensorView grad;
  std::vector<Factor> factors;
};

// m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W), for every parameter.
// `rounded`: as chain_product.
void preconditioned_step(const std::vector<ParameterStep>& steps, double lr, double momentum,
                         double weight_decay, bool rounded);

}  // namespace tnt
