// The moving average of one mode's Gram matrix. Ren & Goldfarb 2021, Algorithm 2.
#pragma once

#include <cstdint>

namespace tnt {

// A contiguous tensor around one of its modes: (before, d, after), row-major.
struct ModeView {
  int64_t before;
  int64_t d;
  int64_t after;
};

// S <- decay S + (1 - decay) mat_i(G) mat_i(G)^T, row-major (d, d), symmetric to the bit.
// Decay 0 does not read S, decay 1 touches neither S nor G. T is float or double.
template <typename T>
void gram_ema(T* stat, const T* tensor, ModeView view, double decay);

// The same for the diagonal alone: S is (d,).
template <typename T>
void diagonal_gram_ema(T* stat, const T* tensor, ModeView view, double decay);

}  // namespace tnt
