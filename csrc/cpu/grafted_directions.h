// Directions and their grafting scales. Ren & Goldfarb 2021, Algorithm 2; Agarwal et al. 2020.
#pragma once

#include <vector>

#include "cpu/chain.h"
#include "cpu/views.h"

namespace tnt {

// Writes m, v if there is one, and the contiguous direction: float or double like the factors.
// `counts` are the numbers of updates of m and v, this one included.
struct GraftedDirection {
  TensorView momentum;
  TensorView second_moment;  // of Adam; without data, the norm of the momentum is grafted
  TensorView grad;
  std::vector<Factor> factors;
  void* out;
  double counts[2];
};

struct GraftRates {
  double momentum, second_decay, eps;
  bool rounded;  // the products, as chain_product
};

// m <- momentum m + g;  v <- second_decay v + (1 - second_decay) g^2;  P = m x_1 A_1 ... x_k A_k;
// scales[t] = |R| / |P| for every tensor, 0 if |P| is 0; R is Adam's bias-corrected direction or m.
void grafted_directions(const std::vector<GraftedDirection>& directions, const GraftRates& rates,
                        double* scales);

}  // namespace tnt
