// Registers the CUDA operators: device, stream and launches. *_call.cpp has the operators.

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include "cuda/damped_inverse_call.h"
#include "cuda/resident_tables.h"

namespace tnt::cuda {
namespace {

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

// Never freed: at exit, the CUDA runtime may be gone first.
ResidentTables& resident_tables() {
  static auto& tables = *new ResidentTables;
  return tables;
}

// The largest matrix that fits one block's shared memory.
template <typename T>
int64_t largest_in(int64_t shared) {
  int64_t n = kLargestInBlock;
  while (n > 0 && shared_bytes<T>(n) > shared) --n;
  return n;
}

// The current stream of the current device.
class CurrentStream final : public Device {
 public:
  Limits limits() const override {
    int shared = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          stream_.device_index()));
    return {largest_in<float>(shared), largest_in<double>(shared)};
  }

  const std::byte* resident(const std::vector<std::byte>& bytes) override {
    return resident_tables().find_or_send(bytes, stream_);
  }

  void rescale(const Call& call, int64_t tensors) override {
    check_launch(launch_rescale(call, tensors, stream_));
  }

  void invert(const Call& call, const InverseRow* rows, int64_t count, int64_t largest,
              bool is_double) override {
    const auto launch = is_double ? launch_invert<double> : launch_invert<float>;
    check_launch(launch(call, rows, count, largest, stream_));
  }

  void judge(const Call& call, int64_t tensors) override {
    check_launch(launch_judge(call, tensors, stream_));
  }

  void commit(const Call& call, const CopyRow* rows, int64_t count) override {
    check_launch(launch_commit(call, rows, count, stream_));
  }

 private:
  c10::cuda::CUDAStream stream_ = c10::cuda::getCurrentCUDAStream();
};

at::Tensor damped_inverse_op(at::TensorList out, at::TensorList stats, at::IntArrayRef orders,
                             const at::Tensor& damping, bool relative) {
  const at::Device device = stats.empty() ? damping.device() : stats.front().device();
  TORCH_CHECK_VALUE(device.is_cuda(), "stats[0] must be on a GPU, got one on ", device);
  const c10::cuda::CUDAGuard guard(device);
  CurrentStream stream;
  return damped_inverse(stream, out, stats, orders, damping, relative);
}

}  // namespace

void register_cuda_kernels() {
  // Never freed: at exit, PyTorch's dispatcher may be gone first.
  auto& library = *new torch::Library(torch::Library::IMPL, "tnt_kernels", c10::DispatchKey::CUDA,
                                      __FILE__, __LINE__);
  library.impl("damped_inverse", damped_inverse_op);
}

}  // namespace tnt::cuda
