// Inverses against what makes them inverses: with U_i rescaled by the definition in double, (U_i +
// eps I) A_i must be the identity up to roundings.

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/damped_inverse.h"
#include "expect.h"
#include "factor_problems.h"
#include "tensors.h"
#include "threads.h"

namespace {

std::vector<int32_t> call(std::vector<FactorProblem>& problems, double damping, bool relative) {
  std::vector<int32_t> info(problems.size(), -1);
  tnt::damped_inverse(modes_of(problems), damping, relative, info.data());
  EXPECT(keeps_subnormals());
  return info;
}

// U_i + eps I; of a diagonal mode the diagonal.
Values damped(const FactorProblem& problem, size_t mode, double damping, bool relative) {
  const Values first = problem.stats[0].values();
  const int64_t d = problem.stats[mode].sizes()[0];
  double trace = 0, size = 1, others = 1;
  for (int64_t i = 0; i < problem.stats[0].sizes()[0]; ++i) {
    trace += first[problem.diagonal[0] ? i : i * (problem.stats[0].sizes()[0] + 1)];
  }
  for (size_t i = 0; i < problem.stats.size(); ++i) {
    const auto own = static_cast<double>(problem.stats[i].sizes()[0]);
    size *= own;
    if (i != mode) others *= own;
  }
  const auto order = static_cast<double>(problem.stats.size());
  // Apart, because their quotient may be subnormal.
  const double c = size == 0 ? 0 : std::pow(trace, 1 / order) / std::pow(size, 1 / order);
  const double eps = !relative ? damping : c == 0 ? 1 : damping * c;
  Values matrix = problem.stats[mode].values();
  for (double& value : matrix) value = c == 0 ? 0 : value / (std::pow(c, order - 1) * others);
  for (int64_t i = 0; i < d; ++i) matrix[problem.diagonal[mode] ? i : i * (d + 1)] += eps;
  return matrix;
}

// The conditions are below 20, and an inverse's residual grows with them and, as roundings add up,
// with the root of the size.
void check_factors(const FactorProblem& problem, double damping, bool relative) {
  for (size_t i = 0; i < problem.out.size(); ++i) {
    const expect::Case mode("mode " + std::to_string(i));
    const int64_t d = problem.out[i].sizes()[0];
    const Values matrix = damped(problem, i, damping, relative);
    const Values inverse = problem.out[i].values();
    const double bound = 16 * std::sqrt(static_cast<double>(d) + 8) * epsilon_of(problem.element());
    if (problem.diagonal[i]) {
      Values product = matrix;
      for (int64_t j = 0; j < d; ++j) product[j] *= inverse[j];
      EXPECT_AT_MOST(distance(product, Values(product.size(), 1)), bound);
    } else {
      EXPECT(symmetric(d, inverse));
      EXPECT_AT_MOST(distance_to_identity(d, times_symmetric(d, matrix, inverse)), bound);
    }
  }
}

void check(std::vector<FactorProblem> problems, double damping, bool relative = false) {
  const std::vector<FactorProblem> before = problems;
  const std::vector<int32_t> info = call(problems, damping, relative);
  for (size_t t = 0; t < problems.size(); ++t) {
    const expect::Case name(name_of(problems[t]) + ", damping " + std::to_string(damping) +
                            (relative ? ", relative" : ""));
    EXPECT(info[t] == 0);
    EXPECT(same_memory(problems[t].stats, before[t].stats));
    check_factors(problems[t], damping, relative);
  }
}

void check_small() {
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const bool relative : {false, true}) {
      for (const double damping : {0.0, 0.25}) {
        check(small_factor_problems(element), damping, relative);
        for (const FactorProblem& problem : small_factor_problems(element)) {
          check({problem}, damping, relative);
        }
      }
    }
  }
  // Both types in one call.
  std::vector<FactorProblem> problems = small_factor_problems(Element::kFloat);
  for (const FactorProblem& problem : small_factor_problems(Element::kDouble)) {
    problems.push_back(problem);
  }
  check(problems, 0.25);
}

// Matrices that get all threads, cut into strips of 256: alone in a call, or outweighing the rest.
void check_large() {
  // 513: one more than the library factorises on its own, and a strip of a single row.
  check({factor_problem(Element::kFloat, {513})}, 0.25);
  // 545: strips on both sides of the halves.
  check({factor_problem(Element::kFloat, {545, 9}), factor_problem(Element::kFloat, {33, 65})},
        0.25);
  check({factor_problem(Element::kDouble, {258})}, 0.25, true);
  {
    const OneThread here;
    check({factor_problem(Element::kFloat, {260})}, 0.25);
  }
  if (kSanitized) return;
  check({factor_problem(Element::kFloat, {1100, 700})}, 0.25, true);
  check({factor_problem(Element::kDouble, {1063})}, 0);
  const OneThread here;
  check({factor_problem(Element::kFloat, {545, 600})}, 0.25);
}

// Where the arithmetic leaves no roundings, or none that matter.
void check_exact() {
  tnt::damped_inverse({}, 0.25, false, nullptr);
  // No element, or no trace: U is zero.
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {40, 0, 2}, {0, 0}, {33, 5}}) {
      for (const bool diagonal : {false, true}) {
        for (const bool relative : {false, true}) {
          const expect::Case name(name_of(element) + name_of(sizes));
          const std::vector<bool> kinds(sizes.size(), diagonal);
          std::vector<FactorProblem> problems = {factor_problem(element, sizes, kinds, 0)};
          EXPECT(call(problems, 0.25, relative)[0] == 0);
          for (size_t i = 0; i < sizes.size(); ++i) {
            Values wanted(static_cast<size_t>(problems[0].out[i].count()), 0.0);
            for (int64_t j = 0; j < sizes[i]; ++j) {
              wanted[diagonal ? j : j * (sizes[i] + 1)] = relative ? 1 : 4;
            }
            EXPECT(problems[0].out[i].values() == wanted);
          }
        }
      }
    }
  }
  std::vector<FactorProblem> problems = {factor_problem(Element::kFloat, {0, 3})};
  EXPECT(call(problems, 0, false)[0] == 2);
  EXPECT(untouched(problems[0]));
  // c = 2, U = diag(3, 1) and diag(2, 2).
  problems = {factor_problem(Element::kDouble, {2, 2}, {false, true})};
  problems[0].stats[0] = Tensor(Element::kDouble, {2, 2}, {12, 0, 0, 4});
  problems[0].stats[1] = Tensor(Element::kDouble, {2}, {8, 8});
  EXPECT(call(problems, 1, false)[0] == 0);
  EXPECT_AT_MOST(distance(problems[0].out[0].values(), {0.25, 0, 0, 0.5}), 1e-15);
  EXPECT_AT_MOST(distance(problems[0].out[1].values(), {1.0 / 3, 1.0 / 3}), 1e-15);
}

// Statistics anywhere in the range of their type, float's subnormal numbers included.
void check_scales() {
  for (const double scale : {0x1p-60, 0x1p60}) {
    check({factor_problem(Element::kFloat, {33, 9}, scale)}, 0.25, true);
    check({factor_problem(Element::kFloat, {9, 7, 5}, {false, true, false}, scale)}, 0.25, true);
    check({factor_problem(Element::kFloat, {40}, scale)}, 0.25, true);
    check({factor_problem(Element::kDouble, {33, 9}, scale * scale)}, 0.25, true);
  }
  check({factor_problem(Element::kFloat, {33, 9}, 0x1p120)}, 0.25, true);
  check({factor_problem(Element::kFloat, {33, 9}, 0x1p-125)}, 0.25, true);
  check({factor_problem(Element::kFloat, {33, 9}, 0x1p-138)}, 0.25, true);
  check({factor_problem(Element::kFloat, {9, 7, 5}, {false, false, true}, 0x1p-130)}, 0.25, true);
  check({factor_problem(Element::kDouble, {33, 9}, 0x1p-1060)}, 0.25, true);
}

// A pivot of a few roundings is as good as none.
void check_pivots() {
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const int factor : {1, 16}) {
      const double pivot = factor * tnt::kPivotRoundings / 4.0 * epsilon_of(element);
      std::vector<FactorProblem> problems = {factor_problem(element, {2})};
      problems[0].stats[0] = Tensor(element, {2, 2}, {1, 1, 1, 1 + pivot});
      EXPECT(call(problems, 0, false)[0] == (factor == 1 ? 1 : 0));
      EXPECT(untouched(problems[0]) == (factor == 1));
    }
  }
}

void check_bad() {
  const auto absolute = [](auto& problems, double damping) {
    return call(problems, damping, false);
  };
  check_damages({2, 33, 140}, absolute, [](const FactorProblem& problem, double damping) {
    check_factors(problem, damping, false);
  });
  check_first_of_many(absolute);
  // In the first half and in the second of a factorisation that is cut.
  for (const int64_t place : {100, 530}) {
    std::vector<FactorProblem> problems = {factor_problem(Element::kFloat, {3, 545})};
    Values stat = problems[0].stats[1].values();
    stat[place * 546] = -8;
    problems[0].stats[1] = Tensor(Element::kFloat, {545, 545}, stat);
    EXPECT(call(problems, 0.25, false)[0] == 2);
    EXPECT(untouched(problems[0]));
  }
}

// Two runs on three threads agree to the bit, and one on a single thread up to roundings.
void check_threads() {
  std::vector<FactorProblem> first = small_factor_problems(Element::kFloat);
  first.push_back(factor_problem(Element::kFloat, {290}));
  std::vector<FactorProblem> second = first, alone = first;
  call(first, 0.25, false);
  call(second, 0.25, false);
  {
    const OneThread here;
    call(alone, 0.25, false);
  }
  for (size_t t = 0; t < first.size(); ++t) {
    const expect::Case name(name_of(first[t]));
    EXPECT(same_memory(first[t].out, second[t].out));
    check_factors(alone[t], 0.25, false);
  }
}

}  // namespace

int main() {
  use_three_threads();
  check_small();
  check_large();
  check_exact();
  check_scales();
  check_pivots();
  check_bad();
  check_threads();
  return expect::finish();
}
