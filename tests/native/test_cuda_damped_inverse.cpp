// The CUDA kernels of damped_inverse on the host (host_launch.h): inverses against what makes them
// inverses. With U_i rescaled by the definition in double, (U_i + eps I) A_i must be the identity
// up to roundings, and the same to the bit in whatever order threads and blocks run.

#include <cmath>
#include <string>
#include <vector>

#include "cpu/damped_inverse.h"
#include "cuda/factor_plan.h"
#include "expect.h"
#include "factor_problems.h"
#include "host_launch.h"
#include "tensors.h"

namespace {

using tnt::cuda::Plan;

constexpr tnt::cuda::Limits kLimits{tnt::cuda::kLargestInBlock, tnt::cuda::kLargestInBlock};
constexpr unsigned kOrders = 4;
static_assert(tnt::cuda::kPivotRoundings == tnt::kPivotRoundings);

Plan plan_of(std::vector<FactorProblem>& problems) {
  std::vector<tnt::cuda::TensorShape> shapes;
  for (const FactorProblem& problem : problems) {
    shapes.push_back({{}, problem.element() == Element::kDouble});
    for (size_t i = 0; i < problem.stats.size(); ++i) {
      shapes.back().modes.push_back({problem.stats[i].sizes()[0], problem.diagonal[i]});
    }
  }
  Plan plan = tnt::cuda::make_plan(shapes, kLimits);
  EXPECT(plan.waves.empty());
  size_t next = 0;
  for (FactorProblem& problem : problems) {
    for (size_t i = 0; i < problem.stats.size(); ++i, ++next) {
      const int64_t* strides = problem.stats[i].view().strides;
      tnt::cuda::ModeRow& row = plan.modes[next];
      row.stat = problem.stats[i].data();
      row.out = problem.out[i].data();
      row.row = strides[0];
      row.column = problem.diagonal[i] ? 0 : strides[1];
    }
  }
  return plan;
}

// In one order.
std::vector<int32_t> call_once(std::vector<FactorProblem>& problems, double damping, bool relative,
                               unsigned seed) {
  const Plan plan = plan_of(problems);
  std::vector<double> scales(plan.modes.size(), kNaN), eps(plan.tensors.size(), kNaN);
  std::vector<int32_t> bad(static_cast<size_t>(plan.slots), 0), info(problems.size(), -1);
  std::vector<std::byte> scratch(static_cast<size_t>(plan.scratch_bytes), std::byte{0xff});
  // A number on the device instead of one on the host makes no difference.
  const bool on_device = seed % 2 == 1;
  const tnt::cuda::Call call{plan.tensors.data(),
                             plan.modes.data(),
                             on_device ? &damping : nullptr,
                             on_device ? kNaN : damping,
                             relative,
                             scales.data(),
                             eps.data(),
                             bad.data(),
                             info.data(),
                             scratch.data()};
  const auto count = [](const auto& rows) { return static_cast<int64_t>(rows.size()); };
  host::Order order(seed);
  host::rescale(call, count(plan.tensors), order);
  host::invert<float>(call, plan.float_rows.data(), count(plan.float_rows), order);
  host::invert<double>(call, plan.double_rows.data(), count(plan.double_rows), order);
  host::judge(call, count(plan.tensors), order);
  host::commit(call, plan.copies.data(), count(plan.copies), order);
  return info;
}

// In several orders, which must agree.
std::vector<int32_t> call(std::vector<FactorProblem>& problems, double damping, bool relative,
                          unsigned orders = kOrders) {
  const std::vector<FactorProblem> before = problems;
  const std::vector<int32_t> info = call_once(problems, damping, relative, 0);
  for (unsigned seed = 1; seed < orders; ++seed) {
    std::vector<FactorProblem> again = before;
    EXPECT(call_once(again, damping, relative, seed) == info);
    for (size_t t = 0; t < problems.size(); ++t) {
      EXPECT(same_memory(problems[t].out, again[t].out));
      EXPECT(same_memory(problems[t].stats, before[t].stats));
    }
  }
  return info;
}

// U_i + eps I; of a diagonal mode the diagonal.
Values damped(const FactorProblem& problem, size_t mode, double damping, bool relative) {
  const Values first = problem.stats[0].values();
  const int64_t d = problem.stats[mode].sizes()[0], d_first = problem.stats[0].sizes()[0];
  long double trace = 0;
  for (int64_t i = 0; i < d_first; ++i) trace += first[problem.diagonal[0] ? i : i * (d_first + 1)];
  double size = 1, others = 1;
  for (size_t i = 0; i < problem.stats.size(); ++i) {
    const auto own = static_cast<double>(problem.stats[i].sizes()[0]);
    size *= own;
    if (i != mode) others *= own;
  }
  const auto order = static_cast<double>(problem.stats.size());
  // Apart, because their quotient may be subnormal.
  const double c =
      size == 0 ? 0 : std::pow(static_cast<double>(trace), 1 / order) / std::pow(size, 1 / order);
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
  const std::vector<int32_t> info = call(problems, damping, relative);
  for (size_t t = 0; t < problems.size(); ++t) {
    const expect::Case name(name_of(problems[t]) + ", damping " + std::to_string(damping) +
                            (relative ? ", relative" : ""));
    EXPECT(info[t] == 0);
    check_factors(problems[t], damping, relative);
  }
}

// Around the patches of 4, the panels of 8, the warps and the largest that fits a block.
constexpr int64_t kSizes[] = {1,  2,  3,  4,  5,  7,  8,  9,   15,  16, 17,
                              31, 32, 33, 63, 64, 65, 96, 100, 127, 128};

void check_sizes() {
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    std::vector<FactorProblem> problems;
    for (const int64_t n : kSizes) {
      check({factor_problem(element, {n})}, 0.25);
      problems.push_back(factor_problem(element, {n}));
    }
    check(problems, 0.25, true);
  }
}

// One to four modes, diagonal ones anywhere, one longer than a piece; both types in one call.
void check_modes() {
  const std::vector<std::pair<Shape, std::vector<bool>>> cases = {
      {{1}, {true}},
      {{300}, {true}},
      {{2 * tnt::cuda::kPiece + 1, 3}, {true, false}},
      {{3, 2 * tnt::cuda::kPiece}, {false, true}},
      {{1, 1}, {false, true}},
      {{64, 9}, {false, false}},
      {{63, 31}, {false, true}},
      {{9, 96}, {true, false}},
      {{3, 5, 9}, {false, false, false}},
      {{33, 1, 4}, {true, true, false}},
      {{2, 3, 4, 5}, {false, true, false, true}},
  };
  for (const bool relative : {false, true}) {
    for (const double damping : {0.0, 0.25}) {
      std::vector<FactorProblem> together;
      for (const Element element : {Element::kFloat, Element::kDouble}) {
        for (const auto& [sizes, diagonal] : cases) {
          check({factor_problem(element, sizes, diagonal)}, damping, relative);
          together.push_back(factor_problem(element, sizes, diagonal));
        }
      }
      check(together, damping, relative);
    }
  }
}

// More tensors than a block has threads, the last of them bad.
void check_many() {
  std::vector<FactorProblem> problems;
  for (int t = 0; t < tnt::cuda::kThreads + 3; ++t) {
    problems.push_back(
        factor_problem(Element::kFloat, {1 + t % 5, 1 + t % 3}, {false, t % 2 == 0}));
  }
  damage(problems.back(), 1, kDamages[3]);
  const std::vector<int32_t> info = call(problems, 0.25, false);
  for (size_t t = 0; t + 1 < problems.size(); ++t) {
    EXPECT(info[t] == 0);
    check_factors(problems[t], 0.25, false);
  }
  EXPECT(info.back() == 2);
  EXPECT(untouched(problems.back()));
}

// Statistics with any strides; NaN lies in the gaps.
void check_layouts() {
  for (const Layout& layout : kLayouts) {
    const expect::Case name(layout.name);
    std::vector<FactorProblem> problems = {
        factor_problem(Element::kFloat, {33, 9}, {false, true}),
        factor_problem(Element::kDouble, {9, 65}, {true, false})};
    for (FactorProblem& problem : problems) {
      for (Tensor& stat : problem.stats) {
        stat = Tensor(stat.element(), stat.sizes(), stat.values(), layout);
      }
    }
    check(problems, 0.25);
  }
}

// Where the arithmetic leaves no roundings, or none that matter.
void check_exact() {
  std::vector<FactorProblem> none;
  EXPECT(call(none, 0.25, false).empty());
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
  // c = 0 also silences modes that are not zero themselves.
  std::vector<FactorProblem> problems = {factor_problem(Element::kFloat, {3, 2})};
  problems[0].stats[0] = Tensor(Element::kFloat, {3, 3}, Values(9, 0.0));
  EXPECT(call(problems, 0.25, false)[0] == 0);
  EXPECT((problems[0].out[1].values() == Values{4, 0, 0, 4}));
  problems = {factor_problem(Element::kFloat, {0, 3})};
  EXPECT(call(problems, 0, false)[0] == 2);
  EXPECT(untouched(problems[0]));
  // c = 2, U = diag(3, 1) and diag(2, 2).
  problems = {factor_problem(Element::kDouble, {2, 2}, {false, true})};
  problems[0].stats[0] = Tensor(Element::kDouble, {2, 2}, {12, 0, 0, 4});
  problems[0].stats[1] = Tensor(Element::kDouble, {2}, {8, 8});
  EXPECT(call(problems, 1, false)[0] == 0);
  EXPECT_AT_MOST(distance(problems[0].out[0].values(), {0.25, 0, 0, 0.5}), 1e-15);
  EXPECT_AT_MOST(distance(problems[0].out[1].values(), {1.0 / 3, 1.0 / 3}), 1e-15);
  // Equal entries, which additions one by one would all round to the same side.
  constexpr int64_t kLong = 50'000;
  problems = {factor_problem(Element::kDouble, {kLong, 1}, {true, true})};
  problems[0].stats[0] = Tensor(Element::kDouble, {kLong}, Values(kLong, 0.7));
  problems[0].stats[1] = Tensor(Element::kDouble, {1}, {kLong * 0.7});
  EXPECT(call(problems, 0.25, false)[0] == 0);
  const Values wanted(kLong, 1 / (std::sqrt(0.7) + 0.25));
  EXPECT_AT_MOST(distance(problems[0].out[0].values(), wanted), 1e-15);
}

// Statistics anywhere in the range of their type, subnormal numbers included.
void check_scales() {
  for (const double scale : {0x1p-60, 0x1p60}) {
    check({factor_problem(Element::kFloat, {33, 9}, scale)}, 0.25, true);
    check({factor_problem(Element::kFloat, {9, 7, 5}, {false, true, false}, scale)}, 0.25, true);
    check({factor_problem(Element::kFloat, {40}, scale)}, 0.25, true);
    check({factor_problem(Element::kDouble, {33, 9}, scale * scale)}, 0.25, true);
  }
  check({factor_problem(Element::kFloat, {33, 9}, 0x1p120)}, 0.25, true);
  check({factor_problem(Element::kFloat, {33, 9}, 0x1p-138)}, 0.25, true);
  check({factor_problem(Element::kFloat, {9, 7, 5}, {false, false, true}, 0x1p-130)}, 0.25, true);
  check({factor_problem(Element::kDouble, {33, 9}, 0x1p-1060)}, 0.25, true);
}

// A pivot of a few roundings is as good as none, wherever it stands: first and last of a panel, in
// the first panel and in later ones. It is held against its own diagonal entry, not another's.
void check_pivots() {
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const int64_t place : {1, 7, 8, 9, 36, 63}) {
      for (const int factor : {1, 16}) {
        const expect::Case name(name_of(element) + ", pivot " + std::to_string(place));
        constexpr int64_t kSize = 65;
        const double pivot = factor * tnt::cuda::kPivotRoundings / 4.0 * epsilon_of(element);
        Values stat(kSize * kSize, 0.0);
        for (int64_t i = 0; i < kSize; ++i) stat[i * (kSize + 1)] = i % 2 == 0 ? 1 : 1024;
        // Rows place - 1 and place: (1, 1; 1, 1 + pivot).
        for (const int64_t r : {place - 1, place}) {
          for (const int64_t c : {place - 1, place}) stat[r * kSize + c] = 1;
        }
        stat[place * (kSize + 1)] += pivot;
        std::vector<FactorProblem> problems = {factor_problem(element, {kSize})};
        problems[0].stats[0] = Tensor(element, {kSize, kSize}, stat);
        EXPECT(call(problems, 0, false)[0] == (factor == 1 ? 1 : 0));
        EXPECT(untouched(problems[0]) == (factor == 1));
      }
    }
  }
}

// Semidefinite matrices of half rank, whose last pivots are roundings of either sign.
void check_singular() {
  for (const Element element : {Element::kFloat, Element::kDouble}) {
    for (const int64_t n : {9, 20, 33, 65, 128}) {
      for (unsigned seed = 1; seed < 9; ++seed) {
        const expect::Case name(name_of(element) + ", " + std::to_string(n));
        const int64_t rank = n / 2;
        const Values b = reals(n * rank, seed);
        Values stat(static_cast<size_t>(n * n));
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t c = 0; c < n; ++c) stat[r * n + c] = dot(&b[r * rank], &b[c * rank], rank);
        }
        std::vector<FactorProblem> problems = {factor_problem(element, {n})};
        problems[0].stats[0] = Tensor(element, {n, n}, stat);
        EXPECT(call(problems, 0, false, 2)[0] == 1);
        EXPECT(untouched(problems[0]));
      }
    }
  }
}

void check_bad() {
  const auto absolute = [](auto& problems, double damping) {
    return call(problems, damping, false, 2);
  };
  check_damages({2, 33, 65}, absolute, [](const FactorProblem& problem, double damping) {
    check_factors(problem, damping, false);
  });
  check_first_of_many(absolute);
  // An inverse that is not finite: 1e-42 is a float, 1e42 is not. In every piece of a diagonal.
  for (const int64_t d : {int64_t{2}, 3 * tnt::cuda::kPiece}) {
    for (const bool diagonal : {false, true}) {
      if (!diagonal && d > 2) continue;
      std::vector<FactorProblem> problems = {
          factor_problem(Element::kFloat, Shape{d}, std::vector<bool>{diagonal})};
      Values stat(static_cast<size_t>(diagonal ? d : d * d), 0.0);
      for (int64_t i = 0; i < d; ++i) stat[diagonal ? i : i * (d + 1)] = i < d / 2 ? 1 : 1e-42;
      problems[0].stats[0] = Tensor(Element::kFloat, problems[0].stats[0].sizes(), stat);
      EXPECT(call(problems, 0, false)[0] == 1);
      EXPECT(untouched(problems[0]));
    }
  }
  // What is not finite counts on either side of the diagonal, near it and far from it.
  for (const int64_t place : {1, 33, 30, 30 * 33, 32, 32 * 33}) {
    std::vector<FactorProblem> problems = {factor_problem(Element::kFloat, {33})};
    Values stat = problems[0].stats[0].values();
    stat[place] = kNaN;
    problems[0].stats[0] = Tensor(Element::kFloat, {33, 33}, stat);
    EXPECT(call(problems, 0.25, false)[0] == 1);
    EXPECT(untouched(problems[0]));
  }
  // Damping that is no number fails everything.
  std::vector<FactorProblem> problems = {factor_problem(Element::kFloat, {9, 3}, {false, true})};
  for (const double damping : {kNaN, kInfinity}) {
    EXPECT(call(problems, damping, false)[0] == 1);
    EXPECT(untouched(problems[0]));
  }
}

// 48 KB is what a block has without asking, 99 KB what the smallest of today's GPUs gives.
void check_shared_memory() {
  EXPECT(tnt::cuda::BlockInverse<float>::bytes(128) <= 48 * 1024);
  EXPECT(tnt::cuda::BlockInverse<double>::bytes(128) <= 99 * 1024);
}

}  // namespace

int main() {
  check_sizes();
  check_modes();
  check_many();
  check_layouts();
  check_exact();
  check_scales();
  check_pivots();
  check_singular();
  check_bad();
  check_shared_memory();
  return expect::finish();
}
