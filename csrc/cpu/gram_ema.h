// The moving averages of the Gram matrices of many tensors. Ren & Goldfarb 2021, Algorithm 2.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/views.h"

namespace tnt {

// One mode of one tensor, and its statistic: row-major (d, d), or (d,) if diagonal; double where
// the tensor is double, else float.
struct GramMode {
  TensorView tensor;
  int64_t mode;
  void* stat;
  bool diagonal;
};

// S <- decay S + (1 - decay) mat_i(G) mat_i(G)^T for every mode given, symmetric to the bit; of an
// S that was not symmetric the lower triangle counts. Decay 0 does not read S, decay 1 touches
// neither S nor G.
void gram_ema(const std::vector<GramMode>& modes, double decay);

}  // namespace tnt
