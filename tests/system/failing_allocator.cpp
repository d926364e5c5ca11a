// Loaded before a program (LD_PRELOAD): its allocations of tensors and of the extension can fail.
//
// Counts the calls of posix_memalign from PyTorch (tensors), and of aligned_alloc and operator new
// from tnt_kernels' extension (workspaces, vectors). From the n-th call on all of them fail. Calls
// of other libraries pass: Python's and OpenMP's own do not survive a failure.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> remaining{-1};  // calls before the first failure; negative: none fails
std::atomic<long> counted{0};

// The addresses of the libraries whose allocations count; dladdr would take a millisecond a call.
struct Library {
  const char* name;  // a part of its path
  uintptr_t first[8], last[8];
  int parts;
};
Library torch{"torch/lib/lib", {}, {}, 0}, extension{"tnt_kernels/_ops", {}, {}, 0};

int find(dl_phdr_info* info, size_t, void*) {
  for (Library* library : {&torch, &extension}) {
    if (std::strstr(info->dlpi_name, library->name) == nullptr) continue;
    for (int i = 0; i < info->dlpi_phnum && library->parts < 8; ++i) {
      const auto& part = info->dlpi_phdr[i];
      if (part.p_type != PT_LOAD || !(part.p_flags & PF_X)) continue;
      const int n = library->parts++;
      library->first[n] = info->dlpi_addr + part.p_vaddr;
      library->last[n] = library->first[n] + part.p_memsz;
    }
  }
  return 0;
}

bool fails(const void* caller, const Library& library) {
  if (remaining.load() < 0) return false;
  const auto address = reinterpret_cast<uintptr_t>(caller);
  bool counts = false;
  for (int i = 0; i < library.parts; ++i) {
    counts = counts || (address >= library.first[i] && address < library.last[i]);
  }
  if (!counts) return false;
  ++counted;
  long left = remaining.load();
  while (left > 0 && !remaining.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0;
}

void* allocated(size_t size, const void* caller) {
  void* memory = fails(caller, extension) ? nullptr : std::malloc(size ? size : 1);
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
  torch.parts = extension.parts = 0;
  dl_iterate_phdr(find, nullptr);
  counted = 0;
  remaining = count;
}

// The number of allocations since then.
long allocations() { return counted; }

int posix_memalign(void** memory, size_t alignment, size_t size) {
  static auto* const original = next<int(void**, size_t, size_t)>("posix_memalign");
  if (fails(__builtin_return_address(0), torch)) return ENOMEM;
  return original(memory, alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  static auto* const original = next<void*(size_t, size_t)>("aligned_alloc");
  if (fails(__builtin_return_address(0), extension)) return nullptr;
  return original(alignment, size);
}

}  // extern "C"

void* operator new(size_t size) { return allocated(size, __builtin_return_address(0)); }
void* operator new[](size_t size) { return allocated(size, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
