#include "cpu/elementwise.h"
#include "cpu/operators.h"

namespace tnt {
namespace {

template <typename T>
int64_t workspace(const ModeProduct& product, bool rounded) {
  return chain_scratch(product.factors, rounded) + copied_count<T>(product.tensor);
}

template <typename T>
void multiply(const ModeProduct& product, bool rounded, T* buffers) {
  const T* source = contiguous_data(product.tensor, buffers);
  chain_product(product.factors, source, T(1), T(0), static_cast<T*>(product.out), buffers,
                rounded);
}

}  // namespace

void mode_products(const std::vector<ModeProduct>& products, bool rounded) {
  run_chains(
      products, [](const ModeProduct& product) { return product.tensor.element; },
      [&](size_t i, auto zero) { return workspace<decltype(zero)>(products[i], rounded); },
      [&](size_t i, auto* buffers) { multiply(products[i], rounded, buffers); });
}

}  // namespace tnt
