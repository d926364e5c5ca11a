// A cache of tables in device memory, keyed by their bytes: only the first training step copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <list>
#include <mutex>
#include <vector>

namespace tnt::cuda {

// For all devices and streams, and thread-safe.
class ResidentTables {
 public:
  // A copy of the bytes in device memory, for the next work on `stream`. Never waits.
  //
  // During graph capture, the copy and its pinned source are kept for ever, because each replay of
  // a captured copy reads the source.
  const std::byte* find_or_send(const std::vector<std::byte>& bytes, c10::cuda::CUDAStream stream);

 private:
  // An optimizer has one table for each set of tensors that it inverts together. The least recently
  // used table is dropped above this number.
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
  std::list<Table> recent_;     // the last used first
  std::list<Table> permanent_;  // read by graphs
};

}  // namespace tnt::cuda
