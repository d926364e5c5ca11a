// Tables in device memory that are sent only where their bytes are new: a training step after the
// first finds its own again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <list>
#include <mutex>
#include <vector>

namespace tnt::cuda {

// Of all devices and streams; safe to call from several threads.
class ResidentTables {
 public:
  // These bytes in device memory, for work that is given to `stream` next. Never waits.
  //
  // While the stream is being captured into a graph, they stay for good, as does the pinned memory
  // they come from: a captured copy reads it whenever the graph is replayed.
  const std::byte* find_or_send(const std::vector<std::byte>& bytes, c10::cuda::CUDAStream stream);

 private:
  // An optimizer has a table for each set of tensors it inverts together; more than so many sets,
  // and the one not seen for the longest is sent again.
  static constexpr size_t kKept = 32;

  class Table {
   public:
    Table(const std::vector<std::byte>& bytes, c10::cuda::CUDAStream stream);
    ~Table();
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;

    bool is(const std::vector<std::byte>& bytes) const { return bytes_ == bytes; }
    c10::cuda::CUDAStream stream() const { return stream_; }
    bool has_arrived() const;
    const std::byte* on_device() const;

   private:
    std::vector<std::byte> bytes_;
    c10::cuda::CUDAStream stream_;
    at::Tensor pinned_, on_device_;
    cudaEvent_t sent_ = nullptr;
  };

  const std::byte* find_or_send_captured(const std::vector<std::byte>& bytes,
                                         c10::cuda::CUDAStream stream);

  std::mutex mutex_;
  std::list<Table> recent_;  // the last used first
  std::list<Table> for_good_;
};

}  // namespace tnt::cuda
