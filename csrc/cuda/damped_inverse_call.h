// One call of damped_inverse: from checked arguments to the kernels. The same for a GPU and for the
// tests' stand-in for one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/damped_inverse.cuh"
#include "cuda/factor_plan.h"

namespace tnt::cuda {

// What a call has done for it. Work is done in the order in which it was given.
class Device {
 public:
  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual Limits limits() const = 0;

  // These bytes, aligned to 16 bytes in the device's memory, for as long as work that was given
  // until the next such request may read them.
  virtual const std::byte* resident(const std::vector<std::byte>& bytes) = 0;

  virtual void rescale(const Call& call, int64_t tensors) = 0;
  virtual void invert(const Call& call, const InverseRow* rows, int64_t count, int64_t largest,
                      bool is_double) = 0;
  virtual void judge(const Call& call, int64_t tensors) = 0;
  virtual void commit(const Call& call, const CopyRow* rows, int64_t count) = 0;
};

// The operator of tnt_kernels/schemas.py. Checks what memory safety needs before anything is
// written.
at::Tensor damped_inverse(Device& device, at::TensorList out, at::TensorList stats,
                          at::IntArrayRef orders, const at::Tensor& damping, bool relative);

}  // namespace tnt::cuda
