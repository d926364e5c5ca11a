#include "cpu/elementwise.h"
#include "cpu/operators.h"

namespace tnt {
namespace {

template <typename T>
int64_t workspace(const ModeProduct& product, bool rounded) {
  return chain_scratch(product.factors, rounded) + copied_count<T>(product.tensor);
}

template <typename T>
void multiply(const ModeProduct& product, bool rounded, Scratch scratch) {
  T* buffers = scratch.take<T>(workspace<T>(product, rounded));
  const T* source = contiguous_data(product.tensor, buffers);
  chain_product(product.factors, source, T(1), T(0), static_cast<T*>(product.out), buffers,
                rounded);
}

}  // namespace

void mode_products(const std::vector<ModeProduct>& products, bool rounded) {
  run_chains(
      products,
      [&](size_t i) {
        return with_state(products[i].tensor.element, [&](auto zero) {
          return Scratch::bytes_of<decltype(zero)>(workspace<decltype(zero)>(products[i], rounded));
        });
      },
      [&](size_t i, Scratch scratch) {
        with_state(products[i].tensor.element,
                   [&](auto zero) { multiply<decltype(zero)>(products[i], rounded, scratch); });
      });
}

}  // namespace tnt
