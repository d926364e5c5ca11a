// Argument checks that say which argument, what it must be, and what came.
//
// Users' mistakes are caught in tnt_kernels/ops.py. These keep memory safe for whoever calls
// torch.ops.tnt_kernels directly.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

namespace tnt {

inline std::string entry(const char* list, int64_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

inline void check_length(const char* name, int64_t got, int64_t wanted) {
  TORCH_CHECK_VALUE(got == wanted, name, " must have ", wanted, " entries, got ", got);
}

inline void check_scalar(const char* name, const at::Tensor& value) {
  TORCH_CHECK_VALUE(value.dim() == 0, name, " must be a 0-dim tensor, got ", value.sizes());
}

// A buffer that a kernel writes through a raw pointer.
inline void check_buffer(const std::string& name, const at::Tensor& tensor, at::ScalarType dtype,
                         at::Device device) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, name, " must be ", dtype, ", got ",
                    tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == device, name, " must be on ", device, ", got ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous, got strides ",
                    tensor.strides());
}

// A statistic or factor of a mode of size d: (d, d), or (d,) for a diagonal mode.
inline void check_mode(const std::string& name, const at::Tensor& tensor, int64_t d) {
  const bool full = tensor.dim() == 2 && tensor.size(0) == d && tensor.size(1) == d;
  const bool diagonal = tensor.dim() == 1 && tensor.size(0) == d;
  TORCH_CHECK_VALUE(full || diagonal, name, " must be (", d, ", ", d, ") or (", d, ",), got ",
                    tensor.sizes());
}

}  // namespace tnt
