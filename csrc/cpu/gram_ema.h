// The moving averages of the Gram matrices of many tensors. Ren & Goldfarb 2021, Algorithm 2.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/chain.h"
#include "cpu/views.h"

namespace tnt {

// One mode of one tensor, and its statistic: row-major (d, d), or (d,) if diagonal; double for
// double tensors, else float.
struct GramMode {
  TensorView tensor;
  int64_t mode;
  void* stat;
  bool diagonal;
  // For whitened Gram matrices: P, contiguous and of G's shape. G is then contiguous and of the
  // statistic's type, and weight mat_i(P) mat_i(G)^T, symmetric up to rounding, is the Gram matrix.
  const void* product = nullptr;
  double weight = 1;
};

// S <- decay S + (1 - decay) mat_i(G) mat_i(G)^T for every mode, symmetric to the bit. Reads only
// the lower triangle of S: nothing of S if decay is 0, neither S nor G if it is 1.
// `rounded`: products of floats may be of bfloat16 numbers, on copies of half the tensors' size.
void gram_ema(const std::vector<GramMode>& modes, double decay, bool rounded);

// A tensor, its statistics, mode after mode, and the factors A_j that whiten it.
struct WhitenedTensor {
  TensorView tensor;
  std::vector<Factor> factors;
  std::vector<void*> stats;
  std::vector<bool> diagonal;
};

// S_i <- decay S_i + (1 - decay) s_i mat_i(P_i) mat_i(G)^T with P_i = G x_{j != i} A_j, for every
// mode. s_i gives the Gram matrix the trace |G|^2; it is 0 if that trace is not positive.
void whitened_gram_ema(const std::vector<WhitenedTensor>& tensors, double decay, bool rounded);

}  // namespace tnt
