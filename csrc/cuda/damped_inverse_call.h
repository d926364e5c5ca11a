// One call of damped_inverse, from its arguments to the kernels, on a GPU or the tests' emulation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/damped_inverse.cuh"
#include "cuda/factor_plan.h"

namespace tnt::cuda {

// Runs a call's work, in the order of the requests.
class Device {
 public:
  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual Limits limits() const = 0;

  // A copy of the bytes in device memory, aligned to 16 bytes, which all work requested before the
  // next call of resident() can read.
  virtual const std::byte* resident(const std::vector<std::byte>& bytes) = 0;

  virtual void rescale(const Call& call, int64_t tensors) = 0;
  virtual void invert(const Call& call, const InverseRow* rows, int64_t count, int64_t largest,
                      bool is_double) = 0;
  virtual void judge(const Call& call, int64_t tensors) = 0;
  virtual void commit(const Call& call, const CopyRow* rows, int64_t count) = 0;
};

// The operator of tnt_kernels/schemas.py. Checks memory safety before anything is written.
at::Tensor damped_inverse(Device& device, at::TensorList out, at::TensorList stats,
                          at::IntArrayRef orders, const at::Tensor& damping, bool relative);

}  // namespace tnt::cuda
