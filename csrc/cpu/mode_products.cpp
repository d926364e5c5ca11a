#include "cpu/mode_products.h"

#include "cpu/elementwise.h"

namespace tnt {
namespace {

template <typename T>
void multiply(const ModeProduct& product, Scratch& scratch) {
  const TensorView& tensor = product.tensor;
  const int64_t beside = chain_scratch(product.factors);
  const T* source = static_cast<const T*>(tensor.data);
  T* buffers;
  if (tensor.element == kElement<T> && tensor.contiguous()) {
    buffers = scratch.get<T>(beside);
  } else {
    T* copy = scratch.get<T>(beside + tensor.count());
    copy_contiguous(tensor, contiguous_strides(tensor).data(), copy);
    source = copy;
    buffers = copy + tensor.count();
  }
  chain_product(product.factors, source, T(1), T(0), static_cast<T*>(product.out), buffers);
}

}  // namespace

void mode_products(const std::vector<ModeProduct>& products) {
  const auto cost = [&](int64_t i) {
    return chain_flops(products[static_cast<size_t>(i)].factors);
  };
  run_small_then_large(static_cast<int64_t>(products.size()), cost,
                       [&](int64_t i, Scratch& scratch) {
                         const ModeProduct& product = products[static_cast<size_t>(i)];
                         if (product.tensor.element == Element::kDouble) {
                           multiply<double>(product, scratch);
                         } else {
                           multiply<float>(product, scratch);
                         }
                       });
}

}  // namespace tnt
