// Elementwise updates of momenta and parameters, which several operators share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "cpu/elementwise.h"
#include "cpu/views.h"

namespace tnt {

// target <- decay m + g; target may be m. Returns |target|^2 if `norm`.
template <bool norm, typename T>
double accumulate(const TensorView& target, const TensorView& momentum, const TensorView& grad,
                  T decay) {
  T* target_data = static_cast<T*>(writable(target));
  const T* momentum_data = static_cast<const T*>(momentum.data);
  double sum = 0;
  with_element(grad.element, [&](auto* null) {
    const auto* grad_data = static_cast<decltype(null)>(grad.data);
    const auto update = [&](const auto& offsets, int64_t count, const auto& strides) {
      T* to = target_data + offsets[0];
      const T* m = momentum_data + offsets[1];
      const auto* g = grad_data + offsets[2];
      return with_strides(strides, [&](auto to_stride, auto m_stride, auto g_stride) {
        double squares = 0;
        T updated[kBlock];
        for (int64_t first = 0; first < count; first += kBlock) {
          const int64_t length = std::min(kBlock, count - first);
          for (int64_t i = 0; i < length; ++i) {
            updated[i] = decay * m[(first + i) * m_stride] + convert<T>(g[(first + i) * g_stride]);
          }
          for (int64_t i = 0; i < length; ++i) to[(first + i) * to_stride] = updated[i];
          if constexpr (norm) squares += sum_of_products(updated, updated, length);
        }
        return squares;
      });
    };
    sum = sum_over_elements<3>(target.order, target.sizes,
                               {target.strides, momentum.strides, grad.strides}, update);
  });
  return sum;
}

template <typename T, typename Value, typename... Stride>
[[gnu::always_inline]] inline void subtract_run(const T* p, T rate, T decay, int64_t count,
                                                Value* w, Stride... stride) {
  const auto [w_stride, p_stride] = std::tuple(stride...);
  for (int64_t i = 0; i < count; ++i) {
    Value& value = w[i * w_stride];
    const T old = convert<T>(value);
    const T shrunk = decay == 0 ? T(0) : decay * old;  // an infinite W that does not decay stays
    value = round_to<Value>(old - (rate * p[i * p_stride] + shrunk));
  }
}

template <typename T, typename Value>
TNT_WIDEST_VECTORS void subtract_flat_run(const T* p, T rate, T decay, int64_t count, Value* w) {
  subtract_run(p, rate, decay, count, w, One(), One());
}

// W <- W - (rate P + decay W), rounded once. P has type T, W any type.
template <typename T>
void subtract(const TensorView& param, const TensorView& direction, T rate, T decay) {
  const T* from = static_cast<const T*>(direction.data);
  with_element(param.element, [&](auto* null) {
    using Value = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    auto* to = static_cast<Value*>(writable(param));
    for_each_run<2>(param.order, param.sizes, {param.strides, direction.strides},
                    [&](int64_t, const auto& offsets, int64_t count, const auto& strides) {
                      Value* w = to + offsets[0];
                      const T* p = from + offsets[1];
                      with_strides(strides, [&](auto w_stride, auto p_stride) {
                        if constexpr (std::is_same_v<decltype(w_stride), One>) {
                          subtract_flat_run(p, rate, decay, count, w);
                        } else {
                          subtract_run(p, rate, decay, count, w, w_stride, p_stride);
                        }
                      });
                    });
  });
}

}  // namespace tnt
