// Inverse roots against what makes them roots: A_i^p (S_i + eps I), in double, must be the identity
// up to roundings and what the iteration leaves when it stops.

#include <cmath>
#include <string>
#include <vector>

#include "cpu/inverse_root.h"
#include "expect.h"
#include "factor_problems.h"
#include "tensors.h"
#include "threads.h"

namespace {

std::vector<int32_t> call(std::vector<FactorProblem>& problems, double damping,
                          const std::vector<int64_t>& roots) {
  std::vector<int32_t> info(problems.size(), -1);
  tnt::inverse_root(modes_of(problems), damping, roots, info.data());
  EXPECT(keeps_subnormals());
  return info;
}

void check_factors(const FactorProblem& problem, double damping, int64_t root) {
  for (size_t i = 0; i < problem.out.size(); ++i) {
    const expect::Case mode("mode " + std::to_string(i) + ", root " + std::to_string(root));
    const int64_t d = problem.out[i].sizes()[0];
    const Values factor = problem.out[i].values();
    Values product = problem.stats[i].values();
    // The iteration stops at kNewtonTolerance. An entry of H has a rounding for each of some ten
    // iterations, of a sum that the condition (below 30) and d's root make worse; p of them count.
    const double rounding = 16 * std::sqrt(static_cast<double>(d) + 8) *
                            epsilon_of(problem.element()) * static_cast<double>(root);
    if (problem.diagonal[i]) {
      for (int64_t j = 0; j < d; ++j) {
        product[j] = (product[j] + damping) * std::pow(factor[j], static_cast<double>(root));
      }
      EXPECT_AT_MOST(distance(product, Values(product.size(), 1)), rounding);
      continue;
    }
    EXPECT(symmetric(d, factor));
    for (int64_t j = 0; j < d; ++j) product[j * (d + 1)] += damping;
    for (int64_t power = 0; power < root; ++power) product = times_symmetric(d, product, factor);
    EXPECT_AT_MOST(distance_to_identity(d, product), tnt::kNewtonTolerance + rounding);
  }
}

void check(std::vector<FactorProblem> problems, double damping, const std::vector<int64_t>& roots) {
  const std::vector<FactorProblem> before = problems;
  const std::vector<int32_t> info = call(problems, damping, roots);
  for (size_t t = 0; t < problems.size(); ++t) {
    const expect::Case name(name_of(problems[t]) + ", damping " + std::to_string(damping));
    EXPECT(info[t] == 0);
    EXPECT(same_memory(problems[t].stats, before[t].stats));
    check_factors(problems[t], damping, roots[t]);
  }
}

// Shampoo's root for each, twice its number of modes.
std::vector<int64_t> usual_roots(const std::vector<FactorProblem>& problems) {
  std::vector<int64_t> roots;
  for (const FactorProblem& problem : problems) {
    roots.push_back(2 * static_cast<int64_t>(problem.stats.size()));
  }
  return roots;
}

void check_small() {
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const double damping : {0.0, 0.25}) {
      const std::vector<FactorProblem> problems = small_factor_problems(element);
      check(problems, damping, usual_roots(problems));
    }
    // Every pattern of bits that a power is put together from.
    for (const int64_t root : {1, 2, 3, 4, 5, 6, 7, 8, 10}) {
      check({factor_problem(element, {9}), factor_problem(element, {33, 5}, {false, true})}, 0.25,
            {root, root});
    }
  }
  std::vector<FactorProblem> both = {factor_problem(Element::kFloat, {9, 40}),
                                     factor_problem(Element::kDouble, {40, 9}),
                                     factor_problem(Element::kFloat, {5})};
  check(both, 0.25, {4, 2, 3});
}

// Matrices that get all threads, in strips of rows.
void check_large() {
  check({factor_problem(Element::kFloat, {64})}, 0.25, {2});
  check({factor_problem(Element::kFloat, {161}), factor_problem(Element::kFloat, {20, 9})}, 0.25,
        {2, 4});
  check({factor_problem(Element::kDouble, {130})}, 0.25, {3});
  if (kSanitized) return;
  check({factor_problem(Element::kFloat, {600})}, 0.25, {4});
  const OneThread here;
  check({factor_problem(Element::kFloat, {300, 260})}, 0.25, {4});
}

void check_exact() {
  tnt::inverse_root({}, 0.25, {}, nullptr);
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {40, 0, 2}, {0, 0}, {33, 5}}) {
      for (const bool diagonal : {false, true}) {
        const expect::Case name(name_of(element) + name_of(sizes));
        const std::vector<bool> kinds(sizes.size(), diagonal);
        std::vector<FactorProblem> problems = {factor_problem(element, sizes, kinds, 0)};
        EXPECT(call(problems, 1.0 / 16, {2})[0] == 0);
        for (size_t i = 0; i < sizes.size(); ++i) {
          Values wanted(static_cast<size_t>(problems[0].out[i].count()), 0.0);
          for (int64_t j = 0; j < sizes[i]; ++j) {
            wanted[diagonal ? j : j * (sizes[i] + 1)] = 4;
          }
          EXPECT_AT_MOST(distance(problems[0].out[i].values(), wanted), 1e-5);
        }
      }
    }
  }
}

// Statistics anywhere in the range of their type: the iteration is scaled.
void check_scales() {
  for (const double scale : {0x1p-100, 0x1p100}) {
    check({factor_problem(Element::kFloat, {33, 9}, scale)}, 0, {4});
    check({factor_problem(Element::kFloat, {9, 7}, {false, true}, scale)}, 0, {2});
    check({factor_problem(Element::kDouble, {33, 9}, scale * scale)}, 0, {4});
  }
}

void check_bad() {
  const Shape mode_sizes = kSanitized ? Shape{2, 33} : Shape{2, 33, 140};
  for (const int64_t root : {1, 2, 4}) {
    const auto with_root = [&](auto& problems, double damping) {
      return call(problems, damping, std::vector<int64_t>(problems.size(), root));
    };
    check_damages(mode_sizes, with_root, [&](const FactorProblem& problem, double damping) {
      check_factors(problem, damping, root);
    });
    check_first_of_many(with_root);
  }
}

// Two runs on three threads agree to the bit, and one on a single thread up to roundings.
void check_threads() {
  std::vector<FactorProblem> first = small_factor_problems(Element::kFloat);
  first.push_back(factor_problem(Element::kFloat, {170}));
  std::vector<FactorProblem> second = first, alone = first;
  const std::vector<int64_t> roots = usual_roots(first);
  call(first, 0.25, roots);
  call(second, 0.25, roots);
  {
    const OneThread here;
    call(alone, 0.25, roots);
  }
  for (size_t t = 0; t < first.size(); ++t) {
    const expect::Case name(name_of(first[t]));
    EXPECT(same_memory(first[t].out, second[t].out));
    check_factors(alone[t], 0.25, roots[t]);
  }
}

}  // namespace

int main() {
  use_three_threads();
  check_small();
  check_large();
  check_exact();
  check_scales();
  check_bad();
  check_threads();
  return expect::finish();
}
