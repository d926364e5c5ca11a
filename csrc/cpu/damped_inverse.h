// Rescaled, damped, inverted statistics. Ren & Goldfarb 2021, equation 13 and Algorithm 2.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/factor_modes.h"

namespace tnt {

// A Cholesky pivot below so many roundings of its diagonal entry counts as zero: its inverse would
// be noise.
constexpr int kPivotRoundings = 16;

// A_i = (U_i + eps I)^-1 for every mode of every tensor, with U_i the statistics rescaled to one
// average eigenvalue c, and eps the damping, or damping c if relative. info[t] is 0, or i + 1 where
// mode i was the first that was not finite or not positive definite; `out` of all modes of such a
// tensor keeps what it held.
void damped_inverse(const std::vector<TensorModes>& tensors, double damping, bool relative,
                    int32_t* info);

}  // namespace tnt
