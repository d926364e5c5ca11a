#include <cuda_runtime_api.h>

#include "cuda/damped_inverse_kernels.cuh"

namespace tnt::cuda {
namespace {

// Bytes of shared memory that a kernel gets without an attribute.
constexpr int64_t kDefaultShared = 48 * 1024;

__global__ void __launch_bounds__(kThreads) rescale_kernel(const Call call) {
  __shared__ Rescale::Shared shared;
  Rescale{call, shared, blockIdx.x}.phases(OnDevice{});
}

template <typename T>
__global__ void __launch_bounds__(kThreads) invert_kernel(const Call call, const InverseRow* rows) {
  extern __shared__ __align__(16) std::byte shared[];
  Invert<T>{call, shared, rows[blockIdx.x]}.phases(OnDevice{});
}

__global__ void __launch_bounds__(kThreads) judge_kernel(const Call call, int64_t tensors) {
  Judge{call, static_cast<int64_t>(blockIdx.x) * kThreads, tensors}.phases(OnDevice{});
}

__global__ void __launch_bounds__(kThreads) commit_kernel(const Call call, const CopyRow* rows) {
  Commit{call, rows[blockIdx.x]}.phases(OnDevice{});
}

unsigned blocks(int64_t count) { return static_cast<unsigned>(count); }

}  // namespace

template <typename T>
int64_t shared_bytes(int64_t n) {
  return BlockInverse<T>::bytes(n);
}

int launch_rescale(const Call& call, int64_t tensors, CUstream_st* stream) {
  if (tensors == 0) return cudaSuccess;
  rescale_kernel<<<blocks(tensors), kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

template <typename T>
int launch_invert(const Call& call, const InverseRow* rows, int64_t count, int64_t largest,
                  CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  const int64_t shared = shared_bytes<T>(largest);
  if (shared > kDefaultShared) {
    const cudaError_t failed = cudaFuncSetAttribute(
        invert_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (failed != cudaSuccess) return failed;
  }
  invert_kernel<T><<<blocks(count), kThreads, static_cast<size_t>(shared), stream>>>(call, rows);
  return cudaGetLastError();
}

int launch_judge(const Call& call, int64_t tensors, CUstream_st* stream) {
  if (tensors == 0) return cudaSuccess;
  judge_kernel<<<blocks((tensors + kThreads - 1) / kThreads), kThreads, 0, stream>>>(call, tensors);
  return cudaGetLastError();
}

int launch_commit(const Call& call, const CopyRow* rows, int64_t count, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  commit_kernel<<<blocks(count), kThreads, 0, stream>>>(call, rows);
  return cudaGetLastError();
}

template int64_t shared_bytes<float>(int64_t);
template int64_t shared_bytes<double>(int64_t);
template int launch_invert<float>(const Call&, const InverseRow*, int64_t, int64_t, CUstream_st*);
template int launch_invert<double>(const Call&, const InverseRow*, int64_t, int64_t, CUstream_st*);

}  // namespace tnt::cuda
