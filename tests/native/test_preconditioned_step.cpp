// Steps against the definition written as loops in double. All values are small integers and the
// rates powers of two, so that everything up to W's one rounding is exact in float, in whatever
// order it is taken: the results must be equal.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "chain_definition.h"
#include "cpu/preconditioned_step.h"
#include "expect.h"
#include "tensors.h"
#include "threads.h"

namespace {

struct Problem {
  Tensor param, momentum, grad;
  std::vector<Tensor> factors;
};

struct Rates {
  double lr, momentum, weight_decay;
};

// The finest digit that any of these leaves on an integer is 1/8.
constexpr Rates kAllRates[] = {
    {0.25, 0.5, 0.5}, {0.25, 0.5, 0}, {0.25, 0, 0.5}, {0, 0.5, 0.5}, {1, 1, 0}};
constexpr double kDigits = 8;

struct Layouts {
  Layout param, momentum, grad;
};
constexpr Layouts kAllContiguous{kContiguous, kContiguous, kContiguous};

Problem integer_problem(Element param, Element grad, const Shape& sizes, const Layouts& layouts,
                        const std::vector<bool>& diagonal) {
  const int64_t count = count_of(sizes);
  return {Tensor(param, sizes, integers(count, 8, 1), layouts.param),
          Tensor(state_of(param), sizes, integers(count, 3, 2), layouts.momentum),
          Tensor(grad, sizes, integers(count, 3, 3), layouts.grad),
          integer_factors(param, sizes, diagonal)};
}

void call(std::vector<Problem>& problems, const Rates& rates) {
  std::vector<tnt::ParameterStep> steps;
  for (Problem& problem : problems) {
    steps.push_back({problem.param.view(), problem.momentum.view(), problem.grad.view(),
                     views_of(problem.factors)});
  }
  tnt::preconditioned_step(steps, rates.lr, rates.momentum, rates.weight_decay);
  EXPECT(keeps_subnormals());
}

// m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W).
std::pair<Values, Values> definition(const Problem& problem, const Rates& rates) {
  Values momentum = problem.momentum.values(), param = problem.param.values();
  const Values grad = problem.grad.values();
  for (size_t i = 0; i < momentum.size(); ++i) {
    momentum[i] = rates.momentum * momentum[i] + grad[i];
  }
  const Values direction = chain(momentum, problem.param.sizes(), problem.factors);
  for (size_t i = 0; i < param.size(); ++i) {
    param[i] -= rates.lr * (direction[i] + rates.weight_decay * param[i]);
  }
  return {param, momentum};
}

Values rounded(Element element, Values values) {
  return Tensor(element, {static_cast<int64_t>(values.size())}, values).values();
}

void check(std::vector<Problem> problems, const Rates& rates) {
  const std::vector<Problem> before = problems;
  call(problems, rates);
  for (size_t t = 0; t < problems.size(); ++t) {
    const Problem& old = before[t];
    const Problem& fresh = problems[t];
    const expect::Case name(
        name_of(old.param.element()) + name_of(old.param.sizes()) + ", " +
        name_of(old.grad.element()) + " gradient, lr " + std::to_string(rates.lr) + ", momentum " +
        std::to_string(rates.momentum) + ", weight decay " + std::to_string(rates.weight_decay));
    const auto [param, momentum] = definition(old, rates);
    EXPECT(kDigits * chain_bound(momentum, old.param.sizes(), old.factors) < kExact);
    EXPECT(fresh.momentum.values() == momentum);
    EXPECT(fresh.param.values() == rounded(old.param.element(), param));
    EXPECT(fresh.param.gaps_untouched());
    EXPECT(fresh.momentum.gaps_untouched());
    EXPECT(fresh.grad.memory() == old.grad.memory());
    for (size_t i = 0; i < old.factors.size(); ++i) {
      EXPECT(fresh.factors[i].memory() == old.factors[i].memory());
    }
  }
}

// Every layout of every tensor, beside several of the others'.
void check_layouts() {
  std::vector<Layout> readable(std::begin(kLayouts), std::end(kLayouts));
  readable.insert(readable.end(), std::begin(kSharingLayouts), std::end(kSharingLayouts));
  int turn = 0;
  for (size_t i = 0; i < (kSanitized ? 6 : 18); ++i) {
    const Layout& param = kLayouts[i % 6];
    const Layout& momentum = kLayouts[(5 * i + i / 6) % 6];
    const Layout& grad = readable[(4 * i + i / 6) % 9];
    const expect::Case name(std::string(param.name) + ", " + momentum.name + ", " + grad.name);
    for (const Element element : kElements) {
      std::vector<Problem> problems;
      for (const Shape& sizes : kChainShapes) {
        std::vector<bool> diagonal(sizes.size());
        for (size_t mode = 0; mode < sizes.size(); ++mode) diagonal[mode] = (turn >> mode) % 3 == 0;
        const Element gradient = kElements[turn++ % 4];
        problems.push_back(
            integer_problem(element, gradient, sizes, {param, momentum, grad}, diagonal));
      }
      check(problems, kAllRates[(i + static_cast<size_t>(element)) % std::size(kAllRates)]);
    }
  }
}

void check_alone() {
  for (const Shape& sizes : kChainShapes) {
    for (const Rates& rates : kAllRates) {
      for (const Element element : {Element::kFloat, Element::kBFloat16}) {
        const std::vector<bool> kinds(sizes.size(), false);
        check({integer_problem(element, element, sizes, kAllContiguous, kinds)}, rates);
      }
    }
  }
}

void check_large() {
  const Layouts strided{kLayouts[5], kLayouts[1], kSharingLayouts[0]};
  for (const LargeCase& large : kLargeCases) {
    const expect::Case what(large.what);
    check({integer_problem(Element::kFloat, Element::kFloat, large.sizes, kAllContiguous,
                           large.diagonal)},
          kAllRates[0]);
    if (!kSanitized) {
      check(
          {integer_problem(Element::kDouble, Element::kHalf, large.sizes, strided, large.diagonal)},
          kAllRates[0]);
      check(
          {integer_problem(Element::kHalf, Element::kDouble, large.sizes, strided, large.diagonal)},
          kAllRates[1]);
    }
  }
  // Small ones among large ones, which take turns; strided elements in pieces on many threads.
  std::vector<Problem> together;
  for (const size_t i : {1u, 5u}) {
    const LargeCase& large = kLargeCases[i];
    const Element element = i == 5 ? Element::kBFloat16 : Element::kFloat;
    together.push_back(integer_problem(element, element, large.sizes, strided, large.diagonal));
    for (const Shape& sizes : kChainShapes) {
      const std::vector<bool> kinds(sizes.size(), false);
      together.push_back(integer_problem(element, element, sizes, strided, kinds));
    }
  }
  check(together, kAllRates[0]);
}

void check_empty() {
  tnt::preconditioned_step({}, 0.25, 0.5, 0.5);
  for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {4, 0}, {4, 0, 3}, {0, 0}, {1, 0}}) {
    for (const Element element : kElements) {
      const std::vector<bool> kinds(sizes.size(), sizes[0] == 0);
      check({integer_problem(element, element, sizes, kAllContiguous, kinds)}, kAllRates[0]);
    }
  }
}

// 16-bit parameters round once, to the nearest, ties to even, and into subnormals and infinity.
void check_rounding_once() {
  for (const Element element : {Element::kBFloat16, Element::kHalf}) {
    const expect::Case name(name_of(element));
    const Values params = {2048, 2050, 256, 258, 60000, -60000, 0, 0, 1, 1};
    const Values grads = {-1, -1, -1, -1, -5520, 5519, 0x1p-25, -0x1.8p-24, 0x1p-12, -0x1.004p-8};
    std::vector<Problem> problems = {{Tensor(element, {10}, params),
                                      Tensor(Element::kFloat, {10}, Values(10, 0)),
                                      Tensor(Element::kFloat, {10}, grads),
                                      {Tensor(Element::kFloat, {10}, Values(10, 1))}}};
    const std::vector<Problem> before = problems;
    call(problems, {1, 0, 0});
    const auto [param, momentum] = definition(before[0], {1, 0, 0});
    EXPECT(problems[0].param.values() == rounded(element, param));
    EXPECT(problems[0].momentum.values() == momentum);
  }
}

// With sums that do round: two runs on three threads agree to the bit, and one on a single thread
// up to the roundings of another order.
void check_rounding() {
  const std::vector<Shape> shapes = {{401, 99}, {31, 33, 40}, {300}, {65, 9}};
  const Rates rates{0.001, 0.9, 0.01};
  for (const Element element : kElements) {
    const expect::Case name(name_of(element));
    std::vector<Problem> first;
    for (const Shape& sizes : shapes) {
      const int64_t count = count_of(sizes);
      const Layout& layout = sizes.size() == 3 ? kLayouts[5] : kContiguous;
      first.push_back({Tensor(element, sizes, reals(count, 1), layout),
                       Tensor(state_of(element), sizes, reals(count, 2), layout),
                       Tensor(element, sizes, reals(count, 3)),
                       integer_factors(element, sizes, std::vector<bool>(sizes.size()))});
    }
    const std::vector<Problem> before = first;
    std::vector<Problem> second = first, alone = first;
    call(first, rates);
    call(second, rates);
    {
      const OneThread here;
      call(alone, rates);
    }
    for (size_t t = 0; t < first.size(); ++t) {
      const expect::Case sizes(name_of(shapes[t]));
      EXPECT(first[t].param.memory() == second[t].param.memory());
      EXPECT(first[t].momentum.memory() == second[t].momentum.memory());
      EXPECT(first[t].momentum.memory() == alone[t].momentum.memory());
      const auto [param, momentum] = definition(before[t], rates);
      const double spacing = element == Element::kHalf       ? 0x1p-10
                             : element == Element::kBFloat16 ? 0x1p-7
                                                             : 32 * epsilon_of(element);
      const double bound = spacing * largest_of(param);
      EXPECT_AT_MOST(distance(first[t].param.values(), param), bound);
      EXPECT_AT_MOST(distance(alone[t].param.values(), param), bound);
    }
  }
}

}  // namespace

int main() {
  use_three_threads();
  check_layouts();
  check_alone();
  check_large();
  check_empty();
  check_rounding_once();
  check_rounding();
  return expect::finish();
}
