#include "cpu/gram_ema.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/blas.h"

namespace tnt {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kSerialElements = 1 << 15;

template <typename T>
T blend(T stat, T observed, double decay) {
  // Not decay * stat at decay 0: what S held may be NaN.
  const T fresh = static_cast<T>(1 - decay) * observed;
  return decay == 0 ? fresh : static_cast<T>(decay) * stat + fresh;
}

// Both triangles of the product come out of the BLAS, but rounded apart; one of them is kept.
template <typename T>
void mirror_lower(T* stat, int64_t d) {
  for (int64_t row = 0; row < d; ++row) {
    for (int64_t column = 0; column < row; ++column) {
      stat[column * d + row] = stat[row * d + column];
    }
  }
}

}  // namespace

template <typename T>
void gram_ema(T* stat, const T* tensor, ModeView view, double decay) {
  const auto [before, d, after] = view;
  if (decay == 1 || d == 0) return;
  const T alpha = static_cast<T>(1 - decay), beta = static_cast<T>(decay);
  if (before == 0 || after == 0) {
    for (int64_t e = 0; e < d * d; ++e) stat[e] = blend(stat[e], T(0), decay);
    return;
  }
  if (after == 1) {  // the last mode: the tensor is mat_i(G)^T as it lies
    blas::gram(/*transposed=*/true, d, before, alpha, tensor, beta, stat);
  } else {
    for (int64_t slice = 0; slice < before; ++slice) {
      blas::gram(/*transposed=*/false, d, after, alpha, tensor + slice * d * after,
                 slice == 0 ? beta : T(1), stat);
    }
  }
  mirror_lower(stat, d);
}

template <typename T>
void diagonal_gram_ema(T* stat, const T* tensor, ModeView view, double decay) {
  const auto [before, d, after] = view;
  if (decay == 1 || d == 0) return;
  const int64_t per_row = std::max<int64_t>(before * after, 1);
  const int64_t grain = std::max<int64_t>(kSerialElements / per_row, 1);
  at::parallel_for(0, d, grain, [=, before = before, d = d, after = after](int64_t lo, int64_t hi) {
    for (int64_t row = lo; row < hi; ++row) {
      double sum = 0;
      for (int64_t slice = 0; slice < before; ++slice) {
        const T* values = tensor + (slice * d + row) * after;
        for (int64_t e = 0; e < after; ++e) sum += static_cast<double>(values[e]) * values[e];
      }
      stat[row] = blend(stat[row], static_cast<T>(sum), decay);
    }
  });
}

template void gram_ema<float>(float*, const float*, ModeView, double);
template void gram_ema<double>(double*, const double*, ModeView, double);
template void diagonal_gram_ema<float>(float*, const float*, ModeView, double);
template void diagonal_gram_ema<double>(double*, const double*, ModeView, double);

}  // namespace tnt
