#include "cpu/blas.h"

#include <dlfcn.h>

#include <stdexcept>

namespace tnt::blas {
namespace {

template <typename Function>
Function* symbol(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

// Products from PyTorch's MKL; all null if PyTorch has none. (With another BLAS a thread may not be
// able to set a number of threads for itself.)
Products products_of_torch() {
  Products found{};
  if (void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
    found = {symbol<Gemm<float, float>>(torch, "sgemm_"),
             symbol<Gemm<double, double>>(torch, "dgemm_"),
             symbol<Gemm<BFloat16, float>>(torch, "gemm_bf16bf16f32_"),
             symbol<int(int)>(torch, "MKL_Set_Num_Threads_Local")};
    if (!__builtin_cpu_supports("amx-bf16")) found.of_bfloat16s = nullptr;  // not measured
    dlclose(torch);                                                         // it stays loaded
  }
  const bool complete = found.of_floats && found.of_doubles && found.set_threads;
  return complete ? found : Products{};
}

std::string reason;  // of the choice

}  // namespace

void choose_products(const std::string& wanted) {
  products = own_products;
  reason = "TNT_BLAS=" + wanted;
  if (wanted == "own") return;
  if (wanted.empty() && !__builtin_cpu_is("intel")) {
    reason = "no Intel processor";
    return;
  }
  if (!wanted.empty() && wanted != "torch") {
    throw std::invalid_argument("TNT_BLAS must be 'own', 'torch' or not set, got '" + wanted + "'");
  }
  const Products found = products_of_torch();
  if (found.set_threads) {
    products = found;
    if (wanted.empty()) reason = "Intel processor";
  } else if (wanted.empty()) {
    reason = "PyTorch without MKL";
  } else {
    throw std::invalid_argument("TNT_BLAS=torch needs a PyTorch with MKL, and this one has none");
  }
}

std::string description() {
#ifdef TNT_BLAS_CONFIG
  const std::string own = TNT_BLAS_CONFIG();
#else
  const std::string own = "set at build time";
#endif
  return own + (products.set_threads ? ", large products by PyTorch's MKL (" : " (") + reason +
         (multiplies_bfloat16() ? ", bfloat16 units)" : ")");
}

}  // namespace tnt::blas
