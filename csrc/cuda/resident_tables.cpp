#include "cuda/resident_tables.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <cstring>

namespace tnt::cuda {

ResidentTables::Table::Table(const std::vector<std::byte>& bytes, c10::cuda::CUDAStream stream)
    : bytes_(bytes), stream_(stream) {
  const auto count = static_cast<int64_t>(bytes.size());
  const auto options = at::TensorOptions().dtype(at::kByte);
  pinned_ = at::empty({count}, options.pinned_memory(true));
  std::memcpy(pinned_.mutable_data_ptr(), bytes.data(), bytes.size());
  on_device_ = at::empty({count}, options.device(stream.device()));
  // PyTorch's copy, which keeps the pinned memory from being reused before it is read.
  on_device_.copy_(pinned_, /*non_blocking=*/true);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&sent_, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(sent_, stream));
}

ResidentTables::Table::~Table() {
  if (sent_ != nullptr) C10_CUDA_CHECK_WARN(cudaEventDestroy(sent_));
}

// False for a captured copy, which runs only with its graph.
bool ResidentTables::Table::has_arrived() const {
  if (sent_ == nullptr) return false;
  const cudaError_t state = cudaEventQuery(sent_);
  if (state == cudaErrorNotReady) (void)cudaGetLastError();  // CUDA keeps it as the last error
  return state == cudaSuccess;
}

const std::byte* ResidentTables::Table::on_device() const {
  return static_cast<const std::byte*>(on_device_.const_data_ptr());
}

const std::byte* ResidentTables::find_or_send(const std::vector<std::byte>& bytes,
                                              c10::cuda::CUDAStream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return find_or_send_captured(bytes, stream);
  }
  // On the same stream, new work runs after the copy, and later uses of the memory after that work.
  const auto found = std::find_if(recent_.begin(), recent_.end(), [&](const Table& table) {
    return table.stream() == stream && table.is(bytes);
  });
  if (found == recent_.end()) {
    recent_.emplace_front(bytes, stream);
    if (recent_.size() > kKept) recent_.pop_back();
  } else {
    recent_.splice(recent_.begin(), recent_, found);
  }
  return recent_.front().on_device();
}

const std::byte* ResidentTables::find_or_send_captured(const std::vector<std::byte>& bytes,
                                                       c10::cuda::CUDAStream stream) {
  // The event query and the pinned allocation are not part of the graph.
  const c10::cuda::CUDAStreamCaptureModeGuard outside_graph(cudaStreamCaptureModeRelaxed);
  const auto is_there = [&](const Table& table) {
    return table.stream().device() == stream.device() && table.is(bytes) && table.has_arrived();
  };
  const auto kept = std::find_if(permanent_.begin(), permanent_.end(), is_there);
  if (kept != permanent_.end()) return kept->on_device();
  const auto found = std::find_if(recent_.begin(), recent_.end(), is_there);
  if (found != recent_.end()) {
    permanent_.splice(permanent_.begin(), recent_, found);
  } else {
    permanent_.emplace_front(bytes, stream);
  }
  return permanent_.front().on_device();
}

}  // namespace tnt::cuda
