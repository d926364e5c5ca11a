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
// Larger entries of |M - I| mean that H is not the root. So does an entry of kNewtonTrace / d: a
// negative eigenvalue lowers the trace of M by more than 1.
constexpr double kNewtonConverged = 0.1;
constexpr double kNewtonTrace = 0.5;

// A_i = (S_i + damping I)^(-1/roots[t]) for every mode of every tensor t; `info` and `out` as in
// damped_inverse. A mode also fails if the iteration does not converge.
void inverse_root(const std::vector<TensorModes>& tensors, double damping,
                  const std::vector<int64_t>& roots, int32_t* info);

}  // namespace tnt
