// damped_inverse as a GPU would do it, on CPU tensors: all of csrc/cuda but the launches themselves
// and the memory of tables. tests/gpu/test_cuda_on_host.py builds and calls it.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cuda/damped_inverse_call.h"
#include "host_launch.h"

namespace {

// What damped_inverse.cu is linked for elsewhere.
class Host final : public tnt::cuda::Device {
 public:
  Host(int64_t largest, unsigned seed) : largest_(largest), order_(seed) {}

  tnt::cuda::Limits limits() const override { return {largest_, largest_}; }

  const std::byte* resident(const std::vector<std::byte>& bytes) override {
    tables_ = bytes;
    return tables_.data();
  }

  void rescale(const tnt::cuda::Call& call, int64_t tensors) override {
    host::rescale(call, tensors, order_);
  }

  void invert(const tnt::cuda::Call& call, const tnt::cuda::InverseRow* rows, int64_t count,
              int64_t largest, bool is_double) override {
    TORCH_CHECK(largest <= largest_);
    is_double ? host::invert<double>(call, rows, count, order_)
              : host::invert<float>(call, rows, count, order_);
  }

  void judge(const tnt::cuda::Call& call, int64_t tensors) override {
    host::judge(call, tensors, order_);
  }

  void commit(const tnt::cuda::Call& call, const tnt::cuda::CopyRow* rows, int64_t count) override {
    host::commit(call, rows, count, order_);
  }

 private:
  int64_t largest_;
  host::Order order_;
  std::vector<std::byte> tables_;
};

// `largest`: the largest matrix that gets a block of its own.
at::Tensor damped_inverse(at::TensorList out, at::TensorList stats, at::IntArrayRef orders,
                          const at::Tensor& damping, bool relative, int64_t largest, int64_t seed) {
  Host host(largest, static_cast<unsigned>(seed));
  return tnt::cuda::damped_inverse(host, out, stats, orders, damping, relative);
}

}  // namespace

TORCH_LIBRARY(tnt_cuda_on_host, library) {
  library.def(
      "damped_inverse(Tensor(a!)[] out, Tensor[] stats, int[] orders, Tensor damping, "
      "bool relative, int largest, int seed) -> Tensor");
}

TORCH_LIBRARY_IMPL(tnt_cuda_on_host, CPU, library) {
  library.impl("damped_inverse", damped_inverse);
}
