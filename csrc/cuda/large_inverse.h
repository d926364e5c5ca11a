// damped_inverse of matrices that are too large for one block, with PyTorch's linear algebra, on
// any device and without waiting for it.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/factor_plan.h"

namespace tnt::cuda {

// (scale S + eps I)^-1 of every matrix of a group, symmetric to the bit: (matrices, size, size),
// with a matrix of size d in the first d rows and columns. Sets the group's flags in `bad` (int32,
// for all slots) if a matrix or its inverse is not finite, or a Cholesky pivot is at most
// kPivotRoundings roundings of its diagonal entry. `scales` is float64 for each mode, `eps` for
// each tensor.
at::Tensor invert_group(const LargeGroup& group, const Plan& plan, at::TensorList stats,
                        const at::Tensor& scales, const at::Tensor& eps, const at::Tensor& bad);

}  // namespace tnt::cuda
