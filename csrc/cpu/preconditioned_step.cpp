#include "cpu/preconditioned_step.h"

#include "cpu/elementwise.h"

namespace tnt {
namespace {

struct Rates {
  double lr, momentum, weight_decay;
};

// m <- momentum m + g
template <typename T>
void accumulate(const ParameterStep& step, T decay) {
  T* m = static_cast<T*>(writable(step.momentum));
  with_element(step.grad.element, [&](auto* null) {
    const auto* g = static_cast<decltype(null)>(step.grad.data);
    for_each_element<2>(step.param.order, step.param.sizes,
                        {step.momentum.strides, step.grad.strides},
                        [&](const auto& offsets, int64_t count, const auto& strides) {
                          T* to = m + offsets[0];
                          const auto* from = g + offsets[1];
                          if (strides[0] == 1 && strides[1] == 1) {
                            for (int64_t i = 0; i < count; ++i) {
                              to[i] = decay * to[i] + convert<T>(from[i]);
                            }
                          } else {
                            for (int64_t i = 0; i < count; ++i) {
                              T& value = to[i * strides[0]];
                              value = decay * value + convert<T>(from[i * strides[1]]);
                            }
                          }
                        });
  });
}

// W <- W - rate W
template <typename T>
void decay(int64_t count, T rate, T* w) {
  const int64_t stride = 1;
  for_each_element<1>(1, &count, {&stride}, [&](const auto& offsets, int64_t length, const auto&) {
    T* values = w + offsets[0];
    for (int64_t i = 0; i < length; ++i) values[i] -= rate * values[i];
  });
}

// W <- W - lr (P + weight_decay W) for a contiguous P, rounded once.
template <typename T>
void update(const ParameterStep& step, const Rates& rates, const T* direction) {
  const std::vector<int64_t> contiguous = contiguous_strides(step.param);
  const T lr = static_cast<T>(rates.lr), decay = static_cast<T>(rates.weight_decay);
  with_element(step.param.element, [&](auto* null) {
    using Value = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    auto* w = static_cast<Value*>(writable(step.param));
    for_each_element<2>(step.param.order, step.param.sizes, {step.param.strides, contiguous.data()},
                        [&](const auto& offsets, int64_t count, const auto& strides) {
                          Value* to = w + offsets[0];
                          const T* from = direction + offsets[1];
                          for (int64_t i = 0; i < count; ++i) {
                            Value& value = to[i * strides[0]];
                            const T old = convert<T>(value);
                            value =
                                round_to<Value>(old - lr * (from[i * strides[1]] + decay * old));
                          }
                        });
  });
}

template <typename T>
void take(const ParameterStep& step, const Rates& rates, Scratch& scratch) {
  const bool flat_momentum = step.momentum.contiguous();
  // Then the last product writes W itself: W <- W - lr A_1 (...).
  const bool direct = step.param.element == kElement<T> && step.param.contiguous();
  const int64_t count = step.param.count();
  T* buffers = scratch.get<T>(chain_scratch(step.factors) + (flat_momentum ? 0 : count) +
                              (direct ? 0 : count));
  // Only now: where there is too little memory, the momentum stays what it was, too.
  accumulate(step, static_cast<T>(rates.momentum));
  const T* m = static_cast<const T*>(step.momentum.data);
  if (!flat_momentum) {
    copy_contiguous(step.momentum, contiguous_strides(step.momentum).data(), buffers);
    m = buffers;
    buffers += count;
  }
  if (direct) {
    T* w = static_cast<T*>(writable(step.param));
    // Not as the product's factor of W: 1 - lr weight_decay, rounded, would decay all of W by a
    // little too much or too little, step after step.
    if (rates.weight_decay != 0) decay(count, static_cast<T>(rates.lr * rates.weight_decay), w);
    chain_product(step.factors, m, static_cast<T>(-rates.lr), T(1), w, buffers);
  } else {
    T* direction = buffers;
    chain_product(step.factors, m, T(1), T(0), direction, buffers + count);
    update(step, rates, direction);
  }
}

}  // namespace

void preconditioned_step(const std::vector<ParameterStep>& steps, double lr, double momentum,
                         double weight_decay) {
  const Rates rates{lr, momentum, weight_decay};
  const auto cost = [&](int64_t i) { return chain_flops(steps[static_cast<size_t>(i)].factors); };
  run_small_then_large(static_cast<int64_t>(steps.size()), cost, [&](int64_t i, Scratch& scratch) {
    const ParameterStep& step = steps[static_cast<size_t>(i)];
    if (step.param.element == Element::kDouble) {
      take<double>(step, rates, scratch);
    } else {
      take<float>(step, rates, scratch);
    }
  });
}

}  // namespace tnt
