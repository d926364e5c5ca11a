// Inverse roots of damped statistics. Ren & Goldfarb 2021, Algorithm 4; Anil et al. 2021.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/factor_modes.h"

namespace tnt {

// The coupled Newton iteration's limits: Ren & Goldfarb 2021, appendix, and Anil et al. 2021.
constexpr int kNewtonIterations = 100;
constexpr double kNewtonTolerance = 1e-6;
constexpr double kNewtonGrowth = 1.2;
// An iterate with a larger entry of |M - I| is no root; nor is one with an entry of kNewtonTrace /
// d: a negative eigenvalue would take more than 1 off the trace of M.
constexpr double kNewtonConverged = 0.1;
constexpr double kNewtonTrace = 0.5;

// A_i = (S_i + damping I)^(-1/roots[t]) for every mode of every tensor t; `info` and `out` as in
// damped_inverse. A mode also fails where the iteration does not converge.
void inverse_root(const std::vector<TensorModes>& tensors, double damping,
                  const std::vector<int64_t>& roots, int32_t* info);

}  // namespace tnt
