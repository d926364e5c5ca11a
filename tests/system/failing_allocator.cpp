// Loaded before a program (LD_PRELOAD): its allocations of tensors and of the extension can fail.
//
// Counts the calls of posix_memalign from PyTorch (tensors), and of aligned_alloc and operator new
// from tnt_kernels' extension (workspaces, vectors). From the n-th call on all of them fail. Calls
// of other libraries pass: Python's and OpenMP's own do not survive a failure.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> remaining{-1};  // calls before the first failure; negative: none fails
std::atomic<long> counted{0};

bool is_from(const void* caller, const char* library) {
  Dl_info info;
  return dladdr(caller, &info) != 0 && info.dli_fname != nullptr &&
         std::strstr(info.dli_fname, library) != nullptr;
}

bool fails(const void* caller, const char* library) {
  if (remaining.load() < 0 || !is_from(caller, library)) return false;
  ++counted;
  long left = remaining.load();
  while (left > 0 && !remaining.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0;
}

void* allocated(size_t size, const void* caller) {
  void* memory = fails(caller, "tnt_kernels/_ops") ? nullptr : std::malloc(size ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// The next `count` allocations succeed, later ones fail; negative: all succeed.
void fail_allocations_after(long count) {
  counted = 0;
  remaining = count;
}

// The number of allocations since then.
long allocations() { return counted; }

int posix_memalign(void** memory, size_t alignment, size_t size) {
  static auto* const original = next<int(void**, size_t, size_t)>("posix_memalign");
  if (fails(__builtin_return_address(0), "torch/lib/lib")) return ENOMEM;
  return original(memory, alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  static auto* const original = next<void*(size_t, size_t)>("aligned_alloc");
  if (fails(__builtin_return_address(0), "tnt_kernels/_ops")) return nullptr;
  return original(alignment, size);
}

}  // extern "C"

void* operator new(size_t size) { return allocated(size, __builtin_return_address(0)); }
void* operator new[](size_t size) { return allocated(size, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
