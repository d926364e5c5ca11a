// The moving averages of the Gram matrices of many tensors. Ren & Goldfarb 2021, Algorithm 2.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/views.h"

namespace tnt {

// One mode of one tensor, and its statistic: row-major (d, d), or (d,) if diagonal; double for
// double tensors, else float.
struct GramMode {
  TensorView tensor;
  int64_t mode;
  void* stat;
  bool diagonal;
};

// S <- decay S + (1 - decay) mat_i(G) mat_i(G)^T for every mode, symmetric to the bit. Reads only
// the lower triangle of S: nothing of S if decay is 0, neither S nor G if it is 1.
// `rounded`: products of floats may be of bfloat16 numbers, on copies of half the tensors' size.
void gram_ema(const std::vector<GramMode>& modes, double decay, bool rounded);

}  // namespace tnt
