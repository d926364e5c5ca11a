#include "cuda/large_inverse.h"

#include <ATen/Functions.h>

#include <limits>

namespace tnt::cuda {
namespace {

// diag(scale S + eps I, I) for every matrix, its lower triangle. The identity does not change the
// rest of the inverse.
at::Tensor padded_batch(const LargeGroup& group, const Plan& plan, at::TensorList stats,
                        const at::Tensor& scales, const at::Tensor& eps) {
  const auto count = static_cast<int64_t>(group.modes.size());
  const auto options = stats[static_cast<size_t>(group.modes.front())].options();
  const at::Tensor batch = at::zeros({count, group.size, group.size}, options);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t mode = group.modes[static_cast<size_t>(i)];
    const ModeRow& row = plan.modes[static_cast<size_t>(mode)];
    const at::Tensor padded = batch.select(0, i);
    at::Tensor matrix = padded.narrow(0, 0, row.d).narrow(1, 0, row.d);
    at::mul_out(matrix, stats[static_cast<size_t>(mode)], scales.select(0, mode));
    matrix.tril_();
    matrix.diagonal().add_(eps.select(0, row.tensor));
    if (row.d < group.size) padded.diagonal().narrow(0, row.d, group.size - row.d).fill_(1);
  }
  return batch;
}

// Whether each matrix is finite, by its extremes, which propagate NaN: isfinite() of the batch
// would allocate a second one.
at::Tensor all_finite(const at::Tensor& batch) {
  const auto [least, most] = at::aminmax(batch.flatten(1), /*dim=*/1);
  return at::isfinite(least).logical_and_(at::isfinite(most));
}

}  // namespace

at::Tensor invert_group(const LargeGroup& group, const Plan& plan, at::TensorList stats,
                        const at::Tensor& scales, const at::Tensor& eps, const at::Tensor& bad) {
  at::Tensor batch = padded_batch(group, plan, stats, scales, eps);
  const double rounding = batch.scalar_type() == at::kDouble
                              ? std::numeric_limits<double>::epsilon()
                              : std::numeric_limits<float>::epsilon();
  const at::Tensor noise = batch.diagonal(0, 1, 2).mul(kPivotRoundings * rounding);
  const at::Tensor good = all_finite(batch);
  auto [factor, info] = at::linalg_cholesky_ex(batch);
  batch.reset();
  good.logical_and_(info.eq(0));
  good.logical_and_(factor.diagonal(0, 1, 2).square().gt(noise).all(1));

  // Not cholesky_inverse, which waits for its error code and raises.
  at::Tensor inverse =
      at::cholesky_solve(at::eye(group.size, factor.options()).expand_as(factor), factor);
  factor.reset();
  const at::Tensor below = inverse.tril(-1);
  inverse.tril_().add_(below.mT());
  // The solver's result is column-major; the transpose of a symmetric matrix is the same matrix.
  inverse = inverse.mT();
  good.logical_and_(all_finite(inverse));
  const auto count = static_cast<int64_t>(group.modes.size());
  bad.narrow(0, group.first_slot, count).copy_(good.logical_not());
  return inverse;
}

}  // namespace tnt::cuda
