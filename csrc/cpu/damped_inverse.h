// Rescaled, damped, inverted statistics. Ren & Goldfarb 2021, equation 13 and Algorithm 2.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/factor_modes.h"

namespace tnt {

// A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
constexpr int kPivotRoundings = 16;

// A_i = (U_i + eps I)^-1 for every mode of every tensor. U_i are the statistics, rescaled to one
// average eigenvalue c; eps is the damping, or damping c if relative (1 if c is 0). info[t] is 0,
// or i + 1 if mode i is the first that is not finite or not positive definite; then the tensor's
// `out` are kept.
void damped_inverse(const std::vector<TensorModes>& tensors, double damping, bool relative,
                    int32_t* info);

}  // namespace tnt
