// The kernels of csrc/cuda on the host: blocks in a random order, and within a block each phase for
// one thread after the other, in a random order too. A result that depends on the orders would
// depend on them on a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/damped_inverse_kernels.cuh"

namespace host {

// The two orders that a loop would have, then random ones.
class Order {
 public:
  explicit Order(unsigned seed) : seed_(seed), engine_(seed) {}

  std::vector<int64_t> of(int64_t count) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    if (seed_ == 1) std::reverse(order.begin(), order.end());
    if (seed_ > 1) std::shuffle(order.begin(), order.end(), engine_);
    return order;
  }

 private:
  unsigned seed_;
  std::mt19937 engine_;
};

// A block's shared memory, of the exact size, on the heap; what nobody has written is NaN.
class SharedMemory {
 public:
  explicit SharedMemory(int64_t bytes) : memory_(new std::byte[static_cast<size_t>(bytes)]) {
    std::memset(memory_.get(), 0xff, static_cast<size_t>(bytes));
  }
  std::byte* get() { return memory_.get(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

template <typename Kernel>
void run_block(Kernel kernel, Order& order) {
  kernel.phases([&](const auto& phase) {
    for (const int64_t thread : order.of(tnt::cuda::kThreads)) {
      phase(tnt::cuda::Thread{static_cast<int>(thread), tnt::cuda::kThreads});
    }
  });
}

inline void rescale(const tnt::cuda::Call& call, int64_t tensors, Order& order) {
  using tnt::cuda::Rescale;
  for (const int64_t tensor : order.of(tensors)) {
    SharedMemory memory(sizeof(Rescale::Shared));
    run_block(Rescale{call, *reinterpret_cast<Rescale::Shared*>(memory.get()), tensor}, order);
  }
}

template <typename T>
void invert(const tnt::cuda::Call& call, const tnt::cuda::InverseRow* rows, int64_t count,
            Order& order) {
  for (const int64_t block : order.of(count)) {
    const tnt::cuda::ModeRow& mode = call.modes[rows[block].mode];
    // A block on a GPU has what the largest matrix needs: here only what is its own.
    SharedMemory memory(tnt::cuda::BlockInverse<T>::bytes(mode.diagonal ? 0 : mode.d));
    run_block(tnt::cuda::Invert<T>{call, memory.get(), rows[block]}, order);
  }
}

inline void judge(const tnt::cuda::Call& call, int64_t tensors, Order& order) {
  const int64_t blocks = (tensors + tnt::cuda::kThreads - 1) / tnt::cuda::kThreads;
  for (const int64_t block : order.of(blocks)) {
    run_block(tnt::cuda::Judge{call, block * tnt::cuda::kThreads, tensors}, order);
  }
}

inline void commit(const tnt::cuda::Call& call, const tnt::cuda::CopyRow* rows, int64_t count,
                   Order& order) {
  for (const int64_t block : order.of(count)) {
    run_block(tnt::cuda::Commit{call, rows[block]}, order);
  }
}

}  // namespace host
