// Turns tensors into pointers: checks what memory safety needs, then calls the CPU kernels.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>

#include "check.h"
#include "cpu/blas.h"
#include "cpu/gram_ema.h"

namespace tnt {
namespace {

// Autograd must see that a kernel wrote through a pointer.
void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

at::ScalarType state_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

ModeView view_mode(const at::Tensor& tensor, int64_t mode) {
  const auto sizes = tensor.sizes();
  return {c10::multiply_integers(sizes.slice(0, mode)), sizes[mode],
          c10::multiply_integers(sizes.slice(mode + 1))};
}

void check_gram(at::TensorList stats, at::TensorList tensors) {
  int64_t s = 0;
  for (int64_t t = 0; t < static_cast<int64_t>(tensors.size()); ++t) {
    const at::Tensor& tensor = tensors[t];
    const std::string name = entry("tensors", t);
    const auto dtype = tensor.scalar_type();
    TORCH_CHECK_VALUE(
        dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
        name, " must be float32, float64, bfloat16 or float16, got ", dtype);
    TORCH_CHECK_VALUE(tensor.device().is_cpu(), name, " must be on the CPU, got ", tensor.device());
    for (int64_t i = 0; i < tensor.dim(); ++i, ++s) {
      TORCH_CHECK_VALUE(s < static_cast<int64_t>(stats.size()),
                        "stats must have one entry for each mode of each tensor, got only ",
                        stats.size());
      check_buffer(entry("stats", s), stats[s], state_dtype(tensor), at::kCPU);
      check_mode(entry("stats", s), stats[s], tensor.size(i));
      const auto [before, d, after] = view_mode(tensor, i);
      TORCH_CHECK_VALUE(std::max({before, d, after}) <= blas::kMaxSize, name,
                        " is too large: no mode, and no product of the modes on one side of a "
                        "mode, may exceed ",
                        blas::kMaxSize, ", got ", tensor.sizes());
    }
  }
  check_length("stats", static_cast<int64_t>(stats.size()), s);
}

void gram_ema_(at::TensorList stats, at::TensorList tensors, const at::Tensor& decay) {
  check_scalar("decay", decay);
  check_gram(stats, tensors);
  const double weight = decay.item<double>();
  auto stat = stats.begin();
  for (const at::Tensor& given : tensors) {
    const at::Tensor tensor = given.to(state_dtype(given)).contiguous();
    for (int64_t i = 0; i < tensor.dim(); ++i, ++stat) {
      AT_DISPATCH_FLOATING_TYPES(tensor.scalar_type(), "gram_ema_", [&] {
        const auto kernel = stat->dim() == 2 ? gram_ema<scalar_t> : diagonal_gram_ema<scalar_t>;
        kernel(stat->mutable_data_ptr<scalar_t>(), tensor.const_data_ptr<scalar_t>(),
               view_mode(tensor, i), weight);
      });
      mark_written(*stat);
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(tnt_kernels, CPU, library) { library.impl("gram_ema_", gram_ema_); }

}  // namespace tnt
