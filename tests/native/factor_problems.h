// Statistics, memory for their factors, and small linear algebra: for the tests of the inverses.
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/factor_modes.h"
#include "expect.h"
#include "tensors.h"
#include "threads.h"

constexpr double kUntouched = -77;  // what every `out` holds before a call

// One tensor's: full (d, d) or diagonal (d,) for each mode.
struct FactorProblem {
  std::vector<Tensor> stats, out;
  std::vector<bool> diagonal;

  Element element() const { return stats.front().element(); }
};

// Symmetric and positive definite, with eigenvalues from 1 to about 6, and no entry of zero.
inline Values positive_definite(int64_t d, unsigned seed) {
  constexpr int64_t kRank = 4;
  const Values b = reals(d * kRank, seed);
  Values matrix(static_cast<size_t>(d * d));
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c <= r; ++c) {
      double sum = 0;
      for (int64_t l = 0; l < kRank; ++l) sum += b[r * kRank + l] * b[c * kRank + l];
      matrix[r * d + c] = matrix[c * d + r] = (r == c) + 9 * sum / static_cast<double>(d);
    }
  }
  return matrix;
}

inline FactorProblem factor_problem(Element element, const Shape& sizes,
                                    const std::vector<bool>& diagonal, double scale = 1) {
  FactorProblem problem{{}, {}, diagonal};
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t d = sizes[i];
    const auto seed = static_cast<unsigned>(i) + 1;
    Values values = diagonal[i] ? reals(d, seed) : positive_definite(d, seed);
    // Modes of unlike traces, and nothing below 1/4 on a diagonal.
    const double own = scale * std::ldexp(1, 2 - static_cast<int>(i));
    for (double& value : values) value = own * (diagonal[i] ? 1.25 + value : value);
    const Shape shape = diagonal[i] ? Shape{d} : Shape{d, d};
    problem.stats.emplace_back(element, shape, values);
    problem.out.emplace_back(element, shape, Values(values.size(), kUntouched));
  }
  return problem;
}

inline FactorProblem factor_problem(Element element, const Shape& sizes, double scale = 1) {
  return factor_problem(element, sizes, std::vector<bool>(sizes.size(), false), scale);
}

// As the kernels see them: pointers into `problems`.
inline std::vector<tnt::TensorModes> modes_of(std::vector<FactorProblem>& problems) {
  std::vector<tnt::TensorModes> tensors;
  for (FactorProblem& problem : problems) {
    tnt::TensorModes tensor{{}, problem.element()};
    for (size_t i = 0; i < problem.stats.size(); ++i) {
      tensor.modes.push_back({problem.stats[i].data(), problem.out[i].data(),
                              problem.stats[i].sizes()[0], problem.diagonal[i]});
    }
    tensors.push_back(tensor);
  }
  return tensors;
}

// One to four modes, and the sizes around every block: 32 (leaves, mirrored rows), 64 and 128
// (strips of roots), 160, diagonal modes anywhere.
inline std::vector<FactorProblem> small_factor_problems(Element element) {
  const std::vector<std::pair<Shape, std::vector<bool>>> cases = {
      {{1}, {false}},
      {{1}, {true}},
      {{9}, {false}},
      {{31}, {false}},
      {{32}, {false}},
      {{33}, {false}},
      {{65}, {false}},
      {{129}, {false}},
      {{300}, {true}},
      {{1, 1}, {false, true}},
      {{64, 9}, {false, false}},
      {{63, 31}, {false, true}},
      {{9, 96}, {true, false}},
      {{3, 5, 9}, {false, false, false}},
      {{33, 1, 4}, {true, true, false}},
      {{2, 3, 4, 5}, {false, true, false, true}}};
  std::vector<FactorProblem> problems;
  for (const auto& [sizes, diagonal] : cases) {
    problems.push_back(factor_problem(element, sizes, diagonal));
  }
  return problems;
}

inline std::string name_of(const FactorProblem& problem) {
  Shape sizes;
  for (const Tensor& stat : problem.stats) sizes.push_back(stat.sizes()[0]);
  return name_of(problem.element()) + name_of(sizes);
}

inline bool untouched(const FactorProblem& problem) {
  for (const Tensor& out : problem.out) {
    for (const double value : out.values()) {
      if (value != kUntouched) return false;
    }
  }
  return true;
}

inline bool same_memory(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].memory() != b[i].memory()) return false;
  }
  return a.size() == b.size();
}

inline bool symmetric(int64_t d, const Values& matrix) {
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < r; ++c) {
      if (matrix[r * d + c] != matrix[c * d + r]) return false;
    }
  }
  return true;
}

// A B for a symmetric B.
inline Values times_symmetric(int64_t d, const Values& a, const Values& b) {
  Values product(a.size());
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < d; ++c) {
      product[r * d + c] = dot(a.data() + r * d, b.data() + c * d, d);
    }
  }
  return product;
}

inline double distance_to_identity(int64_t d, const Values& matrix) {
  Values identity(matrix.size(), 0.0);
  for (int64_t i = 0; i < d; ++i) identity[i * (d + 1)] = 1;
  return distance(matrix, identity);
}
