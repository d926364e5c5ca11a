// Factors, and the product of a tensor with one in every mode: the definition that mode_products
// and preconditioned_step are held against.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "cpu/chain.h"
#include "tensors.h"

// One for each mode of a tensor of this type: symmetric small integers.
inline std::vector<Tensor> integer_factors(Element element, const Shape& sizes,
                                           const std::vector<bool>& diagonal) {
  std::vector<Tensor> factors;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t d = sizes[i];
    const auto seed = static_cast<unsigned>(i) + 11;
    Values values = integers(diagonal[i] ? d : d * d, 2, seed);
    for (int64_t r = 0; r < d && !diagonal[i]; ++r) {
      for (int64_t c = 0; c < r; ++c) values[c * d + r] = values[r * d + c];
    }
    factors.emplace_back(state_of(element), diagonal[i] ? Shape{d} : Shape{d, d}, values);
  }
  return factors;
}

// As the kernels see them: pointers into these.
inline std::vector<tnt::Factor> views_of(std::vector<Tensor>& factors) {
  std::vector<tnt::Factor> views;
  for (Tensor& factor : factors) {
    views.push_back({factor.data(), factor.sizes()[0], factor.sizes().size() == 1});
  }
  return views;
}

// G x_1 A_1 ... x_k A_k, one mode after the other.
inline Values chain(Values tensor, const Shape& sizes, const std::vector<Tensor>& factors) {
  int64_t before = 1, after = count_of(sizes);
  if (after == 0) return tensor;
  for (size_t mode = 0; mode < sizes.size(); ++mode) {
    const int64_t d = sizes[mode];
    after /= d;
    const Values a = factors[mode].values();
    const bool diagonal = factors[mode].sizes().size() == 1;
    Values product(tensor.size(), 0.0);
    for (int64_t outer = 0; outer < before; ++outer) {
      for (int64_t i = 0; i < d; ++i) {
        double* to = &product[(outer * d + i) * after];
        for (int64_t j = diagonal ? i : 0; j < (diagonal ? i + 1 : d); ++j) {
          const double weight = diagonal ? a[i] : a[i * d + j];
          const double* from = &tensor[(outer * d + j) * after];
          add_multiple(weight, from, after, to);
        }
      }
    }
    tensor = product;
    before *= d;
  }
  return tensor;
}

// A bound on every intermediate number of the product: |G| times the largest row sum of every
// factor. If it is below 2^24 smallest digits, float has every one of these numbers exactly.
inline double chain_bound(const Values& tensor, const Shape& sizes,
                          const std::vector<Tensor>& factors) {
  double bound = largest_of(tensor);
  for (size_t mode = 0; mode < sizes.size(); ++mode) {
    const Values a = factors[mode].values();
    const size_t row = factors[mode].sizes().size() == 1 ? 1 : static_cast<size_t>(sizes[mode]);
    double most = 0;
    for (size_t first = 0; first < a.size(); first += row) {
      double sum = 0;
      for (size_t i = first; i < first + row; ++i) sum += std::abs(a[i]);
      most = std::max(most, sum);
    }
    bound *= std::max(most, 1.0);
  }
  return bound;
}

constexpr double kExact = 0x1p24;

// A tensor large enough for a kernel to give it all threads, and what that is to show.
struct LargeCase {
  const char* what;
  Shape sizes;
  std::vector<bool> diagonal;
};

inline const std::vector<LargeCase> kLargeCases = {
    {"both products cut along the other mode", {200, 230}, {false, false}},
    {"few columns: cut along the factor's rows", {401, 99}, {false, false}},
    {"few rows", {99, 401}, {false, false}},
    {"small products in pieces", {31, 33, 100}, {false, false, false}},
    {"a factor of 128, in pieces", {128, 300}, {false, false}},
    {"diagonal factors only", {561, 563}, {true, true}},
    {"a diagonal mode between full ones", {60, 41, 70}, {false, true, false}},
};
