// Directions and the factors that give them another method's length. Ren & Goldfarb 2021,
// Algorithm 2; Agarwal et al. 2020.
#pragma once

#include <vector>

#include "cpu/chain.h"
#include "cpu/views.h"

namespace tnt {

// m is written, and v where there is one: float or double, as the factors; the direction, too,
// contiguous. `counts`: how many updates m and v have had, with this one.
struct GraftedDirection {
  TensorView momentum;
  TensorView second_moment;  // of Adam; no data: the momentum's own length
  TensorView grad;
  std::vector<Factor> factors;
  void* out;
  double counts[2];
};

struct GraftRates {
  double momentum, second_decay, eps;
};

// m <- momentum m + g;  v <- second_decay v + (1 - second_decay) g^2;  P = m x_1 A_1 ... x_k A_k;
// scales[t] = |R| / |P| for every tensor, 0 where |P| is, R Adam's bias-corrected direction, or m.
void grafted_directions(const std::vector<GraftedDirection>& directions, const GraftRates& rates,
                        double* scales);

}  // namespace tnt
