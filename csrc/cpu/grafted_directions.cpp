#include <cmath>
#include <tuple>
#include <type_traits>

#include "cpu/momentum.h"
#include "cpu/operators.h"

namespace tnt {
namespace {

// The rates of m and v, the numerator's weights of m and g, and eps with v's bias correction.
template <typename T>
struct Adam {
  T momentum, decay, weight, of_momentum, of_grad, floor;
};

// m <- momentum m + g;  v <- decay v + weight g^2;
// ratios: (of_momentum m + of_grad g) / (sqrt(v) + floor).
template <typename T, typename G, typename... Stride>
[[gnu::always_inline]] inline void update_block(const Adam<T>& adam, int64_t count, T* __restrict m,
                                                T* __restrict v, const G* __restrict g,
                                                T* __restrict ratios, Stride... stride) {
  const auto [m_stride, v_stride, g_stride] = std::tuple(stride...);
  for (int64_t i = 0; i < count; ++i) {
    const T gradient = convert<T>(g[i * g_stride]);
    const T updated = adam.momentum * m[i * m_stride] + gradient;
    const T square = adam.decay * v[i * v_stride] + adam.weight * gradient * gradient;
    m[i * m_stride] = updated;
    v[i * v_stride] = square;
    const T numerator = adam.of_momentum * updated + adam.of_grad * gradient;
    ratios[i] = numerator / (std::sqrt(square) + adam.floor);
  }
}

// Roots and quotients limit this loop, not memory: the usual case gets the widest vectors.
TNT_WIDEST_VECTORS void update_flat_block(const Adam<float>& adam, int64_t count, float* m,
                                          float* v, const float* g, float* ratios) {
  update_block(adam, count, m, v, g, ratios, One(), One(), One());
}

// Updates m and v; returns the norm of Adam's direction, |c n / (sqrt(v / d) + eps)| with the bias
// corrections c and d, as c sqrt(d) |n / (sqrt(v) + eps sqrt(d))|. n is m, or mu m + g.
template <typename T>
double update_moments(const GraftedDirection& one, const GraftRates& rates) {
  // The momentum is not averaged: Adam's first moment is 1 - mu times it. mu m + g sums one more
  // power of mu than m does.
  const double mu = rates.momentum, powers = one.counts[0] + (rates.nesterov ? 1 : 0);
  const double first_correction = (1 - mu) / (1 - std::pow(mu, powers));
  const double second_correction = 1 - std::pow(rates.second_decay, one.counts[1]);
  const Adam<T> adam{static_cast<T>(mu),
                     static_cast<T>(rates.second_decay),
                     static_cast<T>(1 - rates.second_decay),
                     static_cast<T>(rates.nesterov ? mu : 1),
                     static_cast<T>(rates.nesterov),
                     static_cast<T>(rates.eps * std::sqrt(second_correction))};
  T* momentum = static_cast<T*>(writable(one.momentum));
  T* second_moment = static_cast<T*>(writable(one.second_moment));
  double sum = 0;
  with_element(one.grad.element, [&](auto* null) {
    const auto* grad = static_cast<decltype(null)>(one.grad.data);
    const auto update = [&](const auto& offsets, int64_t count, const auto& strides) {
      return with_strides(strides, [&](auto m_stride, auto v_stride, auto g_stride) {
        constexpr bool flat = std::is_same_v<decltype(m_stride), One>;
        using G = std::remove_cvref_t<decltype(*grad)>;
        double squares = 0;
        T ratios[kBlock];
        for (int64_t first = 0; first < count; first += kBlock) {
          const int64_t length = std::min(kBlock, count - first);
          T* m = momentum + offsets[0] + first * m_stride;
          T* v = second_moment + offsets[1] + first * v_stride;
          const G* g = grad + offsets[2] + first * g_stride;
          if constexpr (flat && std::is_same_v<T, float> && std::is_same_v<G, float>) {
            update_flat_block(adam, length, m, v, g, ratios);
          } else {
            update_block(adam, length, m, v, g, ratios, m_stride, v_stride, g_stride);
          }
          squares += sum_of_products(ratios, ratios, length);
        }
        return squares;
      });
    };
    sum = sum_over_elements<3>(one.momentum.order, one.momentum.sizes,
                               {one.momentum.strides, one.second_moment.strides, one.grad.strides},
                               update);
  });
  return first_correction * std::sqrt(second_correction * sum);
}

template <typename T>
int64_t workspace(const GraftedDirection& one, const GraftRates& rates) {
  return chain_scratch(one.factors, rates.rounded) +
         (rates.nesterov ? 0 : copied_count<T>(one.momentum));
}

template <typename T>
void make_direction(const GraftedDirection& one, const GraftRates& rates, T* buffers,
                    double* norms) {
  const T mu = static_cast<T>(rates.momentum);
  const bool adam = one.second_moment.data != nullptr;
  norms[0] = adam ? update_moments<T>(one, rates)
                  : std::sqrt(accumulate<true>(one.momentum, one.momentum, one.grad, mu));
  T* direction = static_cast<T*>(one.out);
  const T* source = direction;  // which chain_product writes last
  if (rates.nesterov) {
    const Strides strides = contiguous_strides(one.momentum);
    const TensorView ahead{direction, one.momentum.element, one.momentum.order, one.momentum.sizes,
                           strides.data()};
    const double squares = accumulate<true>(ahead, one.momentum, one.grad, mu);
    if (!adam) norms[0] = std::sqrt(squares);
  } else {
    source = contiguous_data(one.momentum, buffers);
  }
  chain_product(one.factors, source, T(1), T(0), direction, buffers, rates.rounded);
  norms[1] = std::sqrt(inner_product(direction, direction, one.momentum.count()));
}

}  // namespace

void grafted_directions(const std::vector<GraftedDirection>& directions, const GraftRates& rates,
                        double* norms) {
  run_chains(
      directions, [](const GraftedDirection& one) { return one.momentum.element; },
      [&](size_t i, auto zero) { return workspace<decltype(zero)>(directions[i], rates); },
      [&](size_t i, auto* buffers) {
        make_direction(directions[i], rates, buffers, norms + 2 * i);
      });
}

}  // namespace tnt
