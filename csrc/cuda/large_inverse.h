// damped_inverse of matrices that are too large for one block, on PyTorch's linear algebra, for any
// device, without waiting for it.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/factor_plan.h"

namespace tnt::cuda {

// (scale S + eps I)^-1 of every matrix of a group, symmetric to the bit: (matrices, size, size), of
// which a matrix of size d fills the first d rows and columns. Sets the group's flags in `bad`
// (int32, all slots) where a matrix or its inverse is not finite, or a Cholesky pivot is at most
// kPivotRoundings roundings of its diagonal entry.
//
// `scales` and `eps`, float64, have an entry for each mode and each tensor of the plan.
at::Tensor invert_group(const LargeGroup& group, const Plan& plan, at::TensorList stats,
                        const at::Tensor& scales, const at::Tensor& eps, const at::Tensor& bad);

}  // namespace tnt::cuda
