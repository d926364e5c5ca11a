// Inverses and inverse roots against the definition: A_i^p (U_i + eps I), in double, must be the
// identity up to roundings.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/operators.h"
#include "expect.h"
#include "factor_problems.h"
#include "tensors.h"
#include "threads.h"

namespace {

using Problems = std::vector<FactorProblem>;
using Infos = std::vector<int32_t>;

struct Method {
  const char* name;
  bool inverts;
  bool relative = false;  // damping
  int64_t root = 0;       // 0: Shampoo's, twice a tensor's number of modes

  int64_t root_of(const FactorProblem& problem) const {
    return inverts ? 1 : root ? root : 2 * static_cast<int64_t>(problem.stats.size());
  }
};
constexpr Method kInverse{"inverse", true}, kRoot{"root", false};

Method relative(Method method) {
  method.relative = true;
  return method;
}

Method with_root(int64_t root) {
  Method method = kRoot;
  method.root = root;
  return method;
}

Infos call(const Method& method, Problems& problems, double damping) {
  const Problems before = problems;
  Infos info(problems.size(), -1);
  if (method.inverts) {
    tnt::damped_inverse(modes_of(problems), damping, method.relative, info.data());
  } else {
    std::vector<int64_t> roots;
    for (const FactorProblem& problem : problems) roots.push_back(method.root_of(problem));
    tnt::inverse_root(modes_of(problems), damping, method.relative, roots, info.data());
  }
  EXPECT(keeps_subnormals());
  for (size_t t = 0; t < problems.size(); ++t) {
    EXPECT(same_memory(problems[t].stats, before[t].stats));
  }
  return info;
}

double trace_of(const Values& stat, int64_t d, bool diagonal) {
  long double trace = 0;
  for (int64_t i = 0; i < d; ++i) trace += stat[diagonal ? i : i * (d + 1)];
  return static_cast<double>(trace);
}

// S_i + eps I, or of inverses U_i + eps I; the diagonal of a diagonal mode.
Values damped(const Method& method, const FactorProblem& problem, size_t mode, double damping) {
  const Values first = problem.stats[0].values();
  const int64_t d = problem.stats[mode].sizes()[0], d_first = problem.stats[0].sizes()[0];
  Values matrix = problem.stats[mode].values();
  double eps = damping;
  if (method.relative && !method.inverts) {
    eps *= trace_of(matrix, d, problem.diagonal[mode]) / static_cast<double>(d);
  }
  if (method.inverts) {
    const double trace = trace_of(first, d_first, problem.diagonal[0]);
    double size = 1, others = 1;
    for (size_t i = 0; i < problem.stats.size(); ++i) {
      const auto own = static_cast<double>(problem.stats[i].sizes()[0]);
      size *= own;
      if (i != mode) others *= own;
    }
    const auto order = static_cast<double>(problem.stats.size());
    // Two powers, because the quotient may be subnormal.
    const double c = size == 0 ? 0 : std::pow(trace, 1 / order) / std::pow(size, 1 / order);
    if (method.relative) eps = c == 0 ? 1 : damping * c;
    for (double& value : matrix) value = c == 0 ? 0 : value / (std::pow(c, order - 1) * others);
  }
  for (int64_t i = 0; i < d; ++i) matrix[problem.diagonal[mode] ? i : i * (d + 1)] += eps;
  return matrix;
}

// The conditions are below 30. A residual grows with them, with the root of the size as roundings
// add up, and with the power.
void check_factors(const Method& method, const FactorProblem& problem, double damping) {
  const int64_t root = method.root_of(problem);
  for (size_t i = 0; i < problem.out.size(); ++i) {
    const expect::Case mode("mode " + std::to_string(i) + ", root " + std::to_string(root));
    const int64_t d = problem.out[i].sizes()[0];
    const Values factor = problem.out[i].values();
    Values product = damped(method, problem, i, damping);
    const double rounding = 16 * std::sqrt(static_cast<double>(d) + 8) *
                            epsilon_of(problem.element()) * static_cast<double>(root);
    if (problem.diagonal[i]) {
      for (int64_t j = 0; j < d; ++j) product[j] *= std::pow(factor[j], static_cast<double>(root));
      EXPECT_AT_MOST(distance(product, Values(product.size(), 1)), rounding);
      continue;
    }
    EXPECT(symmetric(d, factor));
    for (int64_t power = 0; power < root; ++power) product = times_symmetric(d, product, factor);
    EXPECT_AT_MOST(distance_to_identity(d, product), rounding);
  }
}

void check(const Method& method, Problems problems, double damping) {
  const Infos info = call(method, problems, damping);
  for (size_t t = 0; t < problems.size(); ++t) {
    const expect::Case name(method.name + std::string(", ") + name_of(problems[t]) + ", damping " +
                            std::to_string(damping) + (method.relative ? ", relative" : ""));
    EXPECT(info[t] == 0);
    check_factors(method, problems[t], damping);
  }
}

void check_small() {
  for (const Method& method : {kInverse, kRoot}) {
    Problems both;
    for (const Element element : {Element::kFloat, Element::kDouble}) {
      for (const double damping : {0.0, 0.25}) {
        const Problems problems = small_factor_problems(element);
        check(relative(method), problems, damping);
        check(method, problems, damping);
        for (const FactorProblem& problem : problems) {
          if (method.inverts) check(method, {problem}, damping);
        }
      }
      for (const FactorProblem& problem : small_factor_problems(element)) both.push_back(problem);
    }
    check(method, both, 0.25);
  }
  // Every pattern of bits in a power.
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const int64_t root : {1, 2, 3, 4, 5, 6, 7, 8, 10}) {
      check(with_root(root),
            {factor_problem(element, {9}), factor_problem(element, {33, 5}, {false, true})}, 0.25);
    }
  }
}

// Matrices that get all threads: strips of rows, of 256 columns in inverses.
void check_large() {
  // 513: one more than LAPACK factorises alone, and a strip of one row; 545: strips in both halves.
  check(kInverse, {factor_problem(Element::kFloat, {513})}, 0.25);
  check(kInverse,
        {factor_problem(Element::kFloat, {545, 9}), factor_problem(Element::kFloat, {33, 65})},
        0.25);
  check(relative(kInverse), {factor_problem(Element::kDouble, {258})}, 0.25);
  check(with_root(2), {factor_problem(Element::kFloat, {64})}, 0.25);
  check(kRoot, {factor_problem(Element::kFloat, {161}), factor_problem(Element::kFloat, {20, 9})},
        0.25);
  check(with_root(3), {factor_problem(Element::kDouble, {130})}, 0.25);
  {
    const OneThread here;
    check(kInverse, {factor_problem(Element::kFloat, {260})}, 0.25);
  }
  if (kSanitized) return;
  check(relative(kInverse), {factor_problem(Element::kFloat, {1100, 700})}, 0.25);
  check(kInverse, {factor_problem(Element::kDouble, {1063})}, 0);
  check(with_root(4), {factor_problem(Element::kFloat, {600})}, 0.25);
  const OneThread here;
  check(kInverse, {factor_problem(Element::kFloat, {545, 600})}, 0.25);
  check(with_root(4), {factor_problem(Element::kFloat, {300, 260})}, 0.25);
}

// No element, no trace, or one that counts as none: the damping alone, without roundings.
void check_exact(const Method& method, Element element, const Shape& sizes, bool diagonal,
                 double scale = 0) {
  const expect::Case name(method.name + name_of(element) + name_of(sizes));
  const std::vector<bool> kinds(sizes.size(), diagonal);
  Problems problems = {factor_problem(element, sizes, kinds, scale)};
  EXPECT(call(method, problems, method.inverts ? 0.25 : 1.0 / 16)[0] == 0);
  for (size_t i = 0; i < sizes.size(); ++i) {
    Values wanted(static_cast<size_t>(problems[0].out[i].count()), 0.0);
    for (int64_t j = 0; j < sizes[i]; ++j) {
      wanted[diagonal ? j : j * (sizes[i] + 1)] = method.relative ? 1 : 4;
    }
    EXPECT(problems[0].out[i].values() == wanted);
  }
}

void check_exact() {
  for (const Method& method :
       {kInverse, relative(kInverse), with_root(2), relative(with_root(2))}) {
    Problems problems;
    EXPECT(call(method, problems, 0.25).empty());
    for (const Element element : {Element::kFloat, Element::kDouble}) {
      for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {40, 0, 2}, {0, 0}, {33, 5}}) {
        for (const bool diagonal : {false, true}) {
          check_exact(method, element, sizes, diagonal);
          if (!method.inverts) continue;
          const double least = element == Element::kFloat ? 0x1p-113 : 0x1p-980;
          check_exact(method, element, sizes, diagonal, least);
          check_exact(method, element, sizes, diagonal, least * 0x1p-30);
        }
      }
    }
  }
}

// Statistics anywhere in the range of their type.
void check_scales() {
  for (const double scale : {0x1p-100, 0x1p100}) {
    check(with_root(4), {factor_problem(Element::kFloat, {33, 9}, scale)}, 0);
    check(with_root(2), {factor_problem(Element::kFloat, {9, 7}, {false, true}, scale)}, 0);
    check(with_root(4), {factor_problem(Element::kDouble, {33, 9}, scale * scale)}, 0);
  }
  const Method method = relative(kInverse);
  for (const double scale : {0x1p120, 0x1p60, 0x1p-60, 0x1p-100}) {
    check(method, {factor_problem(Element::kFloat, {33, 9}, scale)}, 0.25);
  }
  for (const double scale : {0x1p60, 0x1p-100}) {
    check(method, {factor_problem(Element::kFloat, {9, 7, 5}, {false, true, false}, scale)}, 0.25);
  }
  check(method, {factor_problem(Element::kDouble, {33, 9}, 0x1p-960)}, 0.25);
}

// A pivot of a few roundings of its own diagonal entry is as good as none, wherever it is: first
// and last of a panel, in the first panel and in later ones.
void check_pivots() {
  constexpr int64_t kSize = 65;
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const int64_t place : {1, 7, 8, 9, 36, 63}) {
      for (const int factor : {1, 16}) {
        const expect::Case name(name_of(element) + std::to_string(place));
        const double pivot = factor * tnt::kPivotRoundings / 4.0 * epsilon_of(element);
        Values stat(kSize * kSize, 0.0);
        for (int64_t i = 0; i < kSize; ++i) stat[i * (kSize + 1)] = i % 2 == 0 ? 1 : 1024;
        // Rows place - 1 and place: (1, 1; 1, 1 + pivot).
        for (const int64_t r : {place - 1, place}) {
          for (const int64_t c : {place - 1, place}) stat[r * kSize + c] = 1;
        }
        stat[place * (kSize + 1)] += pivot;
        Problems problems = {factor_problem(element, {kSize})};
        problems[0].stats[0] = Tensor(element, {kSize, kSize}, stat);
        EXPECT(call(kInverse, problems, 0)[0] == (factor == 1 ? 1 : 0));
        EXPECT(untouched(problems[0]) == (factor == 1));
      }
    }
  }
}

// Makes a statistic indefinite, by the last entry of its diagonal or by another one.
void damage(FactorProblem& problem, size_t mode, int64_t place = -1) {
  Tensor& stat = problem.stats[mode];
  const int64_t d = stat.sizes()[0];
  Values values = stat.values();
  values[(place < 0 ? d - 1 : place) * (problem.diagonal[mode] ? 1 : d + 1)] = -8;
  stat = Tensor(stat.element(), stat.sizes(), values);
}

// A bad mode of a tensor among good ones, of several sizes.
void check_bad(const Method& method, Element element, bool is_diagonal) {
  for (const int64_t d : {2, 33, kSanitized ? 65 : 140}) {
    for (size_t bad = 0; bad < 3; ++bad) {
      const expect::Case name(method.name + std::string(", ") + name_of(element) + ", " +
                              std::to_string(d) + ", mode " + std::to_string(bad));
      Shape sizes = {3, 4, 5};
      std::vector<bool> diagonal(3, false);
      sizes[bad] = d;
      diagonal[bad] = is_diagonal;
      Problems problems = {factor_problem(element, {33, 9}),
                           factor_problem(element, sizes, diagonal), factor_problem(element, {5})};
      damage(problems[1], bad);
      EXPECT(call(method, problems, 0.25) == Infos({0, static_cast<int32_t>(bad) + 1, 0}));
      EXPECT(untouched(problems[1]));
      check_factors(method, problems[0], 0.25);
      check_factors(method, problems[2], 0.25);
    }
  }
}

void check_bad() {
  for (const Method& method : {kInverse, with_root(2)}) {
    for (const Element element : {Element::kFloat, Element::kDouble}) {
      for (const bool diagonal : {false, true}) check_bad(method, element, diagonal);
    }
  }
  // In the first half and in the second of a factorisation that is cut.
  for (const int64_t place : {100, 530}) {
    Problems problems = {factor_problem(Element::kFloat, {3, 545})};
    damage(problems[0], 1, place);
    EXPECT(call(kInverse, problems, 0.25)[0] == 2);
    EXPECT(untouched(problems[0]));
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
  return expect::finish();
}
