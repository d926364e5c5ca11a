#include "cpu/grafted_directions.h"

#include <cmath>
#include <tuple>
#include <type_traits>

#include "cpu/elementwise.h"

namespace tnt {
namespace {

// Elements whose lengths are summed up at a time, from the first-level cache.
constexpr int64_t kBlock = 1024;

using One = std::integral_constant<int64_t, 1>;

// pass(stride...) with strides that the compiler knows where they are all 1.
template <typename Strides, typename Pass>
auto with_strides(const Strides& strides, const Pass& pass) {
  bool contiguous = true;
  for (const int64_t stride : strides) contiguous = contiguous && stride == 1;
  if constexpr (std::tuple_size_v<Strides> == 2) {
    return contiguous ? pass(One(), One()) : pass(strides[0], strides[1]);
  } else {
    return contiguous ? pass(One(), One(), One()) : pass(strides[0], strides[1], strides[2]);
  }
}

// What moves m and v, and the bias correction of eps.
template <typename T>
struct Adam {
  T momentum, kept, taken, floor;
};

// m <- momentum m + g;  v <- kept v + taken g^2;  ratios: m / (sqrt(v) + floor).
template <typename T, typename G, typename... Stride>
[[gnu::always_inline]] inline void move_block(const Adam<T>& adam, int64_t count, T* __restrict m,
                                              T* __restrict v, const G* __restrict g,
                                              T* __restrict ratios, Stride... stride) {
  const auto [m_stride, v_stride, g_stride] = std::tuple(stride...);
  for (int64_t i = 0; i < count; ++i) {
    const T gradient = convert<T>(g[i * g_stride]);
    const T moved = adam.momentum * m[i * m_stride] + gradient;
    const T square = adam.kept * v[i * v_stride] + adam.taken * gradient * gradient;
    m[i * m_stride] = moved;
    v[i * v_stride] = square;
    ratios[i] = moved / (std::sqrt(square) + adam.floor);
  }
}

// Roots and quotients bind here, not memory: the widest vectors that there are, for what is usual.
TNT_WIDEST_VECTORS void move_flat_block(const Adam<float>& adam, int64_t count, float* m, float* v,
                                        const float* g, float* ratios) {
  move_block(adam, count, m, v, g, ratios, One(), One(), One());
}

// m <- mu m + g; returns |m|.
template <typename T>
double move_momentum(const GraftedDirection& one, T mu) {
  T* momentum = static_cast<T*>(writable(one.momentum));
  double sum = 0;
  with_element(one.grad.element, [&](auto* null) {
    const auto* grad = static_cast<decltype(null)>(one.grad.data);
    sum = sum_over_elements<2>(
        one.momentum.order, one.momentum.sizes, {one.momentum.strides, one.grad.strides},
        [&](const auto& offsets, int64_t count, const auto& strides) {
          T* m = momentum + offsets[0];
          const auto* g = grad + offsets[1];
          return with_strides(strides, [&](auto m_stride, auto g_stride) {
            double squares = 0;
            T moved[kBlock];
            for (int64_t first = 0; first < count; first += kBlock) {
              const int64_t length = std::min(kBlock, count - first);
              for (int64_t i = 0; i < length; ++i) {
                T& value = m[(first + i) * m_stride];
                moved[i] = mu * value + convert<T>(g[(first + i) * g_stride]);
                value = moved[i];
              }
              squares += sum_of_squares(moved, length);
            }
            return squares;
          });
        });
  });
  return std::sqrt(sum);
}

// Moves m and v; returns the length of Adam's direction, |c m / (sqrt(v / d) + eps)| with the bias
// corrections c and d, as c sqrt(d) |m / (sqrt(v) + eps sqrt(d))|.
template <typename T>
double move_moments(const GraftedDirection& one, const GraftRates& rates) {
  // The momentum is a plain sum: Adam's first moment is 1 - mu times it.
  const double mu = rates.momentum;
  const double first = (1 - mu) / (1 - std::pow(mu, one.counts[0]));
  const double second = 1 - std::pow(rates.second_decay, one.counts[1]);
  const Adam<T> adam{static_cast<T>(mu), static_cast<T>(rates.second_decay),
                     static_cast<T>(1 - rates.second_decay),
                     static_cast<T>(rates.eps * std::sqrt(second))};
  T* momentum = static_cast<T*>(writable(one.momentum));
  T* second_moment = static_cast<T*>(writable(one.second_moment));
  double sum = 0;
  with_element(one.grad.element, [&](auto* null) {
    const auto* grad = static_cast<decltype(null)>(one.grad.data);
    sum = sum_over_elements<3>(
        one.momentum.order, one.momentum.sizes,
        {one.momentum.strides, one.second_moment.strides, one.grad.strides},
        [&](const auto& offsets, int64_t count, const auto& strides) {
          T* m = momentum + offsets[0];
          T* v = second_moment + offsets[1];
          const auto* g = grad + offsets[2];
          return with_strides(strides, [&](auto m_stride, auto v_stride, auto g_stride) {
            constexpr bool flat = std::is_same_v<decltype(m_stride), One>;
            using G = std::remove_cvref_t<decltype(*g)>;
            double squares = 0;
            T ratios[kBlock];
            for (int64_t first = 0; first < count; first += kBlock) {
              const int64_t length = std::min(kBlock, count - first);
              T* to = m + first * m_stride;
              T* square = v + first * v_stride;
              const G* from = g + first * g_stride;
              if constexpr (flat && std::is_same_v<T, float> && std::is_same_v<G, float>) {
                move_flat_block(adam, length, to, square, from, ratios);
              } else {
                move_block(adam, length, to, square, from, ratios, m_stride, v_stride, g_stride);
              }
              squares += sum_of_squares(ratios, length);
            }
            return squares;
          });
        });
  });
  return first * std::sqrt(second * sum);
}

template <typename T>
double norm(const T* values, int64_t count) {
  const int64_t stride = 1;
  return std::sqrt(sum_over_elements<1>(1, &count, {&stride},
                                        [&](const auto& offsets, int64_t length, const auto&) {
                                          return sum_of_squares(values + offsets[0], length);
                                        }));
}

template <typename T>
double make(const GraftedDirection& one, const GraftRates& rates, Scratch& scratch) {
  const bool flat = one.momentum.contiguous();
  const int64_t count = one.momentum.count();
  T* buffers = scratch.get<T>(chain_scratch(one.factors) + (flat ? 0 : count));
  // Only now: where there is too little memory for the products, the moments stay what they were.
  const double wanted = one.second_moment.data == nullptr
                            ? move_momentum(one, static_cast<T>(rates.momentum))
                            : move_moments<T>(one, rates);
  const T* m = static_cast<const T*>(one.momentum.data);
  if (!flat) {
    copy_contiguous(one.momentum, contiguous_strides(one.momentum).data(), buffers);
    m = buffers;
    buffers += count;
  }
  T* direction = static_cast<T*>(one.out);
  chain_product(one.factors, m, T(1), T(0), direction, buffers);
  const double length = norm(direction, count);
  return length == 0 ? 0 : wanted / length;
}

}  // namespace

void grafted_directions(const std::vector<GraftedDirection>& directions, const GraftRates& rates,
                        double* scales) {
  const auto cost = [&](int64_t i) {
    return chain_flops(directions[static_cast<size_t>(i)].factors);
  };
  run_small_then_large(
      static_cast<int64_t>(directions.size()), cost, [&](int64_t i, Scratch& scratch) {
        const GraftedDirection& one = directions[static_cast<size_t>(i)];
        scales[i] = one.momentum.element == Element::kDouble ? make<double>(one, rates, scratch)
                                                             : make<float>(one, rates, scratch);
      });
}

}  // namespace tnt
