// Inverse roots of damped statistics. Ren & Goldfarb 2021, Algorithm 4; Anil et al. 2021.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/factor_modes.h"

namespace tnt {

// The error of an eigenvalue in units of sqrt(d) eps |S|: two to three times the largest that was
// measured for the smallest eigenvalue, 0.19 at d = 30, 250 and 1000.
constexpr double kEigenvalueRoundings = 0.5;

// A_i = (S_i + damping I)^(-1/roots[t]) for every mode of every tensor t; `info` and `out` as in
// damped_inverse. Of S_i the lower triangle (row-major) is read.
//
// Eigenvalues of S_i that are negative only by roundings of S_i, down to
//   -kEigenvalueRoundings sqrt(d) eps(dtype of S_i) lambda_max,
// count as 0. A mode fails if an entry of S_i or A_i is not finite, or if an eigenvalue + damping
// is not above the roundings of float64, kEigenvalueRoundings sqrt(d) eps(double) lambda_max.
void inverse_root(const std::vector<TensorModes>& tensors, double damping,
                  const std::vector<int64_t>& roots, int32_t* info);

}  // namespace tnt
