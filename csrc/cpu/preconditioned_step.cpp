#include <limits>

#include "cpu/momentum.h"
#include "cpu/operators.h"

namespace tnt {
namespace {

struct Rates {
  double lr, momentum, weight_decay;
  bool rounded;  // the products
};

// W <- W - rate W
template <typename T>
void decay(int64_t count, T rate, T* w) {
  run_parts(count, 16 * static_cast<double>(count), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) w[i] -= rate * w[i];
  });
}

// Whether the last product updates W itself: W <- W - lr A_1 (...). Not if lr is 0 in T: the BLAS
// then skips the product, and a NaN would be lost.
template <typename T>
bool is_direct(const ParameterStep& step, const Rates& rates) {
  return step.param.element == kElement<T> && step.param.contiguous() &&
         rates.lr >= std::numeric_limits<T>::min();
}

template <typename T>
int64_t workspace(const ParameterStep& step, const Rates& rates) {
  return chain_scratch(step.factors, rates.rounded) + copied_count<T>(step.momentum) +
         (is_direct<T>(step, rates) ? 0 : step.param.count());
}

template <typename T>
void step(const ParameterStep& step, const Rates& rates, T* buffers) {
  const int64_t count = step.param.count();
  accumulate<false>(step.momentum, step.momentum, step.grad, static_cast<T>(rates.momentum));
  const T* m = contiguous_data(step.momentum, buffers);
  if (is_direct<T>(step, rates)) {
    T* w = static_cast<T*>(writable(step.param));
    // Not as the product's beta: 1 - lr weight_decay would be rounded, and all of W would decay a
    // little too much or too little in every step.
    if (rates.weight_decay != 0) decay(count, static_cast<T>(rates.lr * rates.weight_decay), w);
    chain_product(step.factors, m, static_cast<T>(-rates.lr), T(1), w, buffers, rates.rounded);
  } else {
    chain_product(step.factors, m, T(1), T(0), buffers, buffers + count, rates.rounded);
    const Strides strides = contiguous_strides(step.param);
    const TensorView direction{buffers, kElement<T>, step.param.order, step.param.sizes,
                               strides.data()};
    subtract(step.param, direction, static_cast<T>(rates.lr),
             static_cast<T>(rates.lr * rates.weight_decay));
  }
}

}  // namespace

void preconditioned_step(const std::vector<ParameterStep>& steps, double lr, double momentum,
                         double weight_decay, bool rounded) {
  const Rates rates{lr, momentum, weight_decay, rounded};
  run_chains(
      steps, [](const ParameterStep& step) { return step.param.element; },
      [&](size_t i, auto zero) { return workspace<decltype(zero)>(steps[i], rates); },
      [&](size_t i, auto* buffers) { step(steps[i], rates, buffers); });
}

}  // namespace tnt
