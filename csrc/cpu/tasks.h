// Runs independent tasks on PyTorch's threads.
#pragma once

#include <immintrin.h>
#include <sys/mman.h>

#ifndef TNT_STD_THREADS
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>
#else
#include <thread>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

namespace tnt {

// Flops one thread does in the time a parallel region takes to start (measured). Below this, a
// second thread costs more than it saves.
constexpr double kParallelFlops = 2e6;

// Treats subnormal numbers as zero during its lifetime. Momenta and statistics of a dead unit decay
// into them, and arithmetic on them is many times slower: MNIST epochs took two to three times as
// long (mnist_tnt_10_epochs_seed1.json, in the history of bench/results).
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | 0x8040);  // subnormal results and operands become zero
  }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  const unsigned saved_;
};

// Asks for large pages: new memory costs one fault for each page.
inline void use_large_pages(void* memory, size_t bytes) {
  constexpr size_t kPage = size_t{2} << 20;
  const size_t start = (reinterpret_cast<size_t>(memory) + kPage - 1) / kPage * kPage;
  const size_t end = (reinterpret_cast<size_t>(memory) + bytes) / kPage * kPage;
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

// Uninitialised memory.
struct Block {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kLarge = 2 * kHugePage;

  Block() = default;
  explicit Block(size_t wanted) {
    const size_t unit = wanted >= kLarge ? kHugePage : 64;
    bytes = (wanted + unit - 1) / unit * unit;
    memory.reset(std::aligned_alloc(unit, bytes));
    if (!memory) throw std::bad_alloc();
    use_large_pages(memory.get(), bytes);
  }

  std::unique_ptr<void, Free> memory;
  size_t bytes = 0;
};

// Keeps one large block for the next call, because the system takes time to clear new memory.
class LargeBlocks {
 public:
  static constexpr size_t kMostKept = size_t{256} << 20;

  Block take(size_t wanted) {
    Block block;
    // try_lock: if the lock is held (possibly by a thread lost in a fork), allocate instead.
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) std::swap(block, kept_);
    if (block.bytes >= wanted) return block;
    block = Block();  // free first: the two never exist at the same time
    return Block(wanted);
  }

  void give_back(Block block) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock && block.bytes > kept_.bytes && block.bytes <= kMostKept) std::swap(block, kept_);
  }

 private:
  std::mutex mutex_;
  Block kept_;
};

inline LargeBlocks large_blocks;

// Memory that a task may write. A Scratch does not own it: nothing is allocated in a task.
class Scratch {
 public:
  Scratch() = default;
  Scratch(void* memory, size_t bytes) : memory_(static_cast<char*>(memory)), bytes_(bytes) {}

  // The next `count` numbers.
  template <typename T>
  T* take(int64_t count) {
    const size_t bytes = bytes_of<T>(count);
    if (bytes > bytes_) throw std::logic_error("a kernel planned too little workspace");
    T* first = reinterpret_cast<T*>(memory_);
    memory_ += bytes;
    bytes_ -= bytes;
    return first;
  }

  // The share of thread i of n.
  Scratch share(int64_t i, int64_t n) const {
    const size_t size = bytes_ / static_cast<size_t>(n) / kLine * kLine;
    return {memory_ + static_cast<size_t>(i) * size, size};
  }

  // The bytes of `count` numbers, in whole cache lines: two threads never write to one line.
  template <typename T>
  static size_t bytes_of(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
  }

 private:
  static constexpr size_t kLine = 64;

  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

// The workspace of a call, taken before its first write: a call that lacks memory changes nothing.
class Workspace {
 public:
  explicit Workspace(size_t bytes) {
    if (bytes > 0) block_ = bytes >= Block::kLarge ? large_blocks.take(bytes) : Block(bytes);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() {
    if (block_.bytes >= Block::kLarge) large_blocks.give_back(std::move(block_));
  }

  Scratch all() const { return {block_.memory.get(), block_.bytes}; }

 private:
  Block block_;
};

// Whether this process was forked after the extension loaded. It has none of the parent's OpenMP
// threads, and a parallel region would wait for them for ever.
inline bool in_forked_child = false;

// Whether this thread runs a task.
inline thread_local bool inside_task = false;

class InsideTask {
 public:
  InsideTask() : before_(inside_task) { inside_task = true; }
  ~InsideTask() { inside_task = before_; }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;

 private:
  const bool before_;
};

// parallelism() is how many tasks can run at once (1 inside a task). on_threads calls work(i) for
// all i in [0, threads), each i on the same one of PyTorch's threads at every call.
#ifndef TNT_STD_THREADS
inline int64_t parallelism() {
  uint32_t threads = 1;
  if (!in_forked_child && !inside_task) torch_get_num_threads(&threads);
  return threads;
}

// No exception may pass through PyTorch's C function: the first one is rethrown afterwards.
template <typename Work>
void on_threads(int64_t threads, const Work& work) {
  if (threads == 1) return work(0);
  struct Call {
    const Work& work;
    std::mutex mutex;
    std::exception_ptr error;
  } call{work, {}, {}};
  const auto run = [](int64_t first, int64_t last, void* context) {
    Call& call = *static_cast<Call*>(context);
    try {
      const InsideTask inside;
      for (int64_t i = first; i < last; ++i) call.work(i);
    } catch (...) {
      const std::lock_guard lock(call.mutex);
      if (!call.error) call.error = std::current_exception();
    }
  };
  const bool failed = torch_parallel_for(0, threads, 1, run, &call) != TORCH_SUCCESS;
  if (call.error) std::rethrow_exception(call.error);
  if (failed) throw std::runtime_error("PyTorch's threads could not be started");
}
#else
// Without PyTorch, for the thread sanitizer, which reports OpenMP's barriers as races.
inline int64_t parallelism() { return inside_task ? 1 : TNT_STD_THREADS; }

template <typename Work>
void on_threads(int64_t threads, const Work& work) {
  if (threads == 1) return work(0);
  std::vector<std::thread> pool;
  for (int64_t i = 0; i < threads; ++i) {
    pool.emplace_back([&, i] {
      const InsideTask inside;
      work(i);
    });
  }
  for (std::thread& thread : pool) thread.join();
}
#endif

inline int64_t threads_for(int64_t count, double flops) {
  return flops < kParallelFlops ? 1 : std::max<int64_t>(std::min(parallelism(), count), 1);
}

// Calls run(task, scratch) for every task in [0, count), in order if on one thread. A thread takes
// the next task when it is done with one, so long tasks come first. `flops` is the cost of all
// tasks. Tasks must not depend on each other or on the thread. The threads share `memory`.
template <typename Run>
void run_tasks(int64_t count, double flops, Scratch memory, const Run& run) {
  std::atomic<int64_t> next{0};
  const int64_t threads = threads_for(count, flops);
  on_threads(threads, [&](int64_t thread) {
    const FlushSubnormals flush;
    const Scratch scratch = memory.share(thread, threads);
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      run(task, scratch);
    }
  });
}

// The same for tasks that need no memory: calls run(task).
template <typename Run>
void run_tasks(int64_t count, double flops, const Run& run) {
  run_tasks(count, flops, Scratch(), [&](int64_t task, Scratch) { run(task); });
}

// Calls run(first, last) for equal parts of [0, count), each on the same thread at every call: for
// memory-bound loops, because a thread finds its part in its caches. (Chunks that went to either of
// two threads took 1.5 times as long, even with 64 MB tensors.)
template <typename Run>
void run_parts(int64_t count, double flops, const Run& run) {
  const int64_t threads = threads_for(count, flops);
  on_threads(threads, [&](int64_t i) {
    const FlushSubnormals flush;
    run(count * i / threads, count * (i + 1) / threads);
  });
}

// An order for tasks of the given flops.
struct Order {
  std::vector<size_t> large;  // first, one after the other, each on all threads
  std::vector<size_t> rest;   // then in parallel, each on one thread
  double flops = 0;           // decides on threads for the rest; order_of counts large tasks, too
};

// A task above one thread's share of the work is large. Both lists keep the tasks' order.
inline Order order_of(const std::vector<double>& flops) {
  Order order;
  order.flops = std::accumulate(flops.begin(), flops.end(), 0.0);
  const double most = 1.01 * order.flops / static_cast<double>(parallelism());
  for (size_t i = 0; i < flops.size(); ++i) {
    (flops[i] > most ? order.large : order.rest).push_back(i);
  }
  return order;
}

// The same, in decreasing cost.
inline Order order_by_cost(const std::vector<double>& flops) {
  Order order = order_of(flops);
  for (auto* tasks : {&order.large, &order.rest}) {
    std::stable_sort(tasks->begin(), tasks->end(),
                     [&](size_t a, size_t b) { return flops[a] > flops[b]; });
  }
  return order;
}

// Calls run(i, scratch) for all tasks. Task i takes bytes(i), a sum of Scratch::bytes_of, of its
// scratch; all memory is allocated before the first task begins.
template <typename Bytes, typename Run>
void run_in_order(const Order& order, const Bytes& bytes, const Run& run) {
  const auto count = static_cast<int64_t>(order.rest.size());
  const int64_t threads = threads_for(count, order.flops);
  size_t most = 0;
  for (const size_t i : order.rest) most = std::max<size_t>(most, bytes(i));
  most *= static_cast<size_t>(threads);
  for (const size_t i : order.large) most = std::max<size_t>(most, bytes(i));
  const Workspace workspace(most);
  {
    const FlushSubnormals flush;
    for (const size_t i : order.large) run(i, workspace.all());
  }
  run_tasks(count, order.flops, workspace.all(), [&](int64_t task, Scratch scratch) {
    run(order.rest[static_cast<size_t>(task)], scratch);
  });
}

}  // namespace tnt
