// Directions and their scales against the definition written as loops in double. Momenta are
// halves of small integers and second moments come to squares of powers of two, so that all but
// the last few operations of a scale are exact in float, in whatever order sums are taken: what is
// written must be equal, and so must the scale where the length is the momentum's own.

#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "chain_definition.h"
#include "cpu/grafted_directions.h"
#include "expect.h"
#include "tensors.h"
#include "threads.h"

namespace {

struct Problem {
  Tensor momentum, second_moment, grad;
  std::vector<Tensor> factors;
  Tensor out;
  double counts[2];
};

struct Method {
  bool adam;
  double momentum, second_decay, eps;
};

// Where eps is not 0, the root of the bias correction must be a power of two: one update of a
// second moment that keeps 3/4.
constexpr Method kMomentum[] = {{false, 0.5, 0.75, 0}, {false, 0, 0.75, 0}, {false, 1, 0.75, 0}};
constexpr Method kAdam[] = {
    {true, 0.5, 0.75, 0}, {true, 0.5, 0.75, 2}, {true, 0, 0.75, 0}, {true, 0.5, 0, 0}};
constexpr double kDigits = 2;  // momenta are halves
constexpr double kExactInDouble = 0x1p53;
// Of the bias corrections, roots and quotients that make a scale of two sums.
constexpr double kLastRoundings = 16 * std::numeric_limits<double>::epsilon();

struct Layouts {
  Layout momentum, second_moment, grad;
};
constexpr Layouts kAllContiguous{kContiguous, kContiguous, kContiguous};

// v, of which 3/4 v + 1/4 g^2 = s^2 with s 1, 2 or 4; 1 where eps is beside it.
Values second_moments(const Values& grad, const Method& method) {
  const Values draws = integers(static_cast<int64_t>(grad.size()), 1, 4);
  Values values(grad.size());
  for (size_t i = 0; i < grad.size(); ++i) {
    const double root = method.eps == 0 ? std::ldexp(1.0, static_cast<int>(draws[i]) + 1) : 1;
    values[i] = (4 * root * root - grad[i] * grad[i]) / 3;
  }
  return values;
}

Problem integer_problem(Element state, Element grad, const Shape& sizes, const Layouts& layouts,
                        const std::vector<bool>& diagonal, const Method& method,
                        double updates = 1) {
  const int64_t count = count_of(sizes);
  Values gradients = integers(count, 1, 3);
  for (double& value : gradients) value = value == 0 ? 2 : value;  // -1, 1 or 2
  const Tensor g(grad, sizes, gradients, layouts.grad);
  const double second_updates = method.eps == 0 ? 2 * updates : 1;
  return {Tensor(state, sizes, integers(count, 3, 2), layouts.momentum),
          Tensor(state, sizes, second_moments(g.values(), method), layouts.second_moment),
          g,
          integer_factors(state, sizes, diagonal),
          Tensor(state, sizes, Values(static_cast<size_t>(count), kNaN)),
          {updates, second_updates}};
}

Values call(std::vector<Problem>& problems, const Method& method) {
  std::vector<tnt::GraftedDirection> directions;
  for (Problem& problem : problems) {
    directions.push_back({problem.momentum.view(),
                          method.adam ? problem.second_moment.view() : tnt::TensorView{},
                          problem.grad.view(),
                          views_of(problem.factors),
                          problem.out.data(),
                          {problem.counts[0], problem.counts[1]}});
  }
  Values scales(problems.size(), kNaN);
  tnt::grafted_directions(directions, {method.momentum, method.second_decay, method.eps},
                          scales.data());
  EXPECT(keeps_subnormals());
  return scales;
}

struct Expected {
  Values momentum, second_moment, direction;
  double scale;
};

// Wide: not all of what is summed up is exact in double, and there are many of them.
UNWATCHED double sum_of_squares(const Values& values) {
  long double sum = 0;
  for (const double value : values) sum += static_cast<long double>(value) * value;
  return static_cast<double>(sum);
}

// m <- mu m + g;  v <- d v + (1 - d) g^2;  P = m x_1 A_1 ... x_k A_k;  |R| / |P| with R = m, or
// R = m^ / (sqrt(v^) + eps), where m^ = (1 - mu) / (1 - mu^n) m and v^ = v / (1 - d^n).
Expected definition(const Problem& problem, const Method& method) {
  Values momentum = problem.momentum.values(), second_moment = problem.second_moment.values();
  const Values grad = problem.grad.values();
  const double first = (1 - method.momentum) / (1 - std::pow(method.momentum, problem.counts[0]));
  const double second = 1 - std::pow(method.second_decay, problem.counts[1]);
  long double sum = 0;
  for (size_t i = 0; i < grad.size(); ++i) {
    momentum[i] = method.momentum * momentum[i] + grad[i];
    long double other = momentum[i];
    if (method.adam) {
      const double square = grad[i] * grad[i];
      second_moment[i] =
          method.second_decay * second_moment[i] + (1 - method.second_decay) * square;
      const long double root = std::sqrt(static_cast<long double>(second_moment[i]) / second);
      other = first * momentum[i] / (root + method.eps);
    }
    sum += other * other;
  }
  const Values direction = chain(momentum, problem.momentum.sizes(), problem.factors);
  const double length = std::sqrt(sum_of_squares(direction));
  const double scale = length == 0 ? 0 : std::sqrt(static_cast<double>(sum)) / length;
  return {momentum, second_moment, direction, scale};
}

void check(std::vector<Problem> problems, const Method& method) {
  const std::vector<Problem> before = problems;
  const Values scales = call(problems, method);
  for (size_t t = 0; t < problems.size(); ++t) {
    const Problem& old = before[t];
    const Problem& fresh = problems[t];
    const Shape& sizes = old.momentum.sizes();
    const expect::Case name(
        name_of(old.momentum.element()) + name_of(sizes) + ", " + name_of(old.grad.element()) +
        " gradient, momentum " + std::to_string(method.momentum) +
        (method.adam ? ", Adam of " + std::to_string(method.second_decay) : "") + ", eps " +
        std::to_string(method.eps));
    const Expected expected = definition(old, method);
    EXPECT(kDigits * chain_bound(expected.momentum, sizes, old.factors) < kExact);
    EXPECT(kDigits * kDigits * sum_of_squares(expected.direction) < kExactInDouble);
    EXPECT(fresh.momentum.values() == expected.momentum);
    EXPECT(fresh.second_moment.values() == expected.second_moment);
    EXPECT(fresh.out.values() == expected.direction);
    if (method.adam) {
      EXPECT_AT_MOST(std::abs(scales[t] - expected.scale), kLastRoundings * expected.scale);
    } else {
      EXPECT(scales[t] == expected.scale);
      EXPECT(fresh.second_moment.memory() == old.second_moment.memory());
    }
    EXPECT(fresh.momentum.gaps_untouched());
    EXPECT(fresh.second_moment.gaps_untouched());
    EXPECT(fresh.grad.memory() == old.grad.memory());
    for (size_t i = 0; i < old.factors.size(); ++i) {
      EXPECT(fresh.factors[i].memory() == old.factors[i].memory());
    }
  }
}

// Every layout of every tensor, beside several of the others', with counts of their own.
void check_layouts() {
  std::vector<Layout> readable(std::begin(kLayouts), std::end(kLayouts));
  readable.insert(readable.end(), std::begin(kSharingLayouts), std::end(kSharingLayouts));
  int turn = 0;
  for (size_t i = 0; i < (kSanitized ? 6 : 18); ++i) {
    const Layout& momentum = kLayouts[i % 6];
    const Layout& second_moment = kLayouts[(5 * i + i / 6) % 6];
    const Layout& grad = readable[(4 * i + i / 6) % 9];
    const expect::Case name(std::string(momentum.name) + ", " + second_moment.name + ", " +
                            grad.name);
    for (const Element state : {Element::kFloat, Element::kDouble}) {
      for (const Method& method :
           {kMomentum[i % std::size(kMomentum)], kAdam[i % std::size(kAdam)]}) {
        std::vector<Problem> problems;
        for (const Shape& sizes : kChainShapes) {
          std::vector<bool> diagonal(sizes.size());
          for (size_t mode = 0; mode < sizes.size(); ++mode) {
            diagonal[mode] = (turn >> mode) % 3 == 0;
          }
          const Element gradient = kElements[turn++ % 4];
          problems.push_back(integer_problem(state, gradient, sizes,
                                             {momentum, second_moment, grad}, diagonal, method,
                                             1 + turn % 5));
        }
        check(problems, method);
      }
    }
  }
}

void check_alone() {
  for (const Shape& sizes : kChainShapes) {
    const std::vector<bool> kinds(sizes.size(), false);
    for (const Element grad : {Element::kFloat, Element::kBFloat16}) {
      for (const Method& method : kMomentum) {
        check({integer_problem(Element::kFloat, grad, sizes, kAllContiguous, kinds, method)},
              method);
      }
      for (const Method& method : kAdam) {
        check({integer_problem(Element::kFloat, grad, sizes, kAllContiguous, kinds, method, 3)},
              method);
      }
    }
  }
}

// On both sides of the blocks and of the chunks that lengths are summed up in.
void check_blocks() {
  const Layouts strided{kLayouts[5], kLayouts[3], kLayouts[5]};
  for (const int64_t size : {1023, 1024, 1025, 8191, 8192, 8193, 20481}) {
    for (const Layouts& layouts : {kAllContiguous, strided}) {
      for (const Method& method : {kMomentum[0], kAdam[0], kAdam[1]}) {
        check({integer_problem(Element::kFloat, Element::kFloat, {size}, layouts, {true}, method),
               integer_problem(Element::kDouble, Element::kHalf, {size}, layouts, {true}, method)},
              method);
      }
    }
  }
}

void check_large() {
  const Layouts strided{kLayouts[5], kLayouts[1], kSharingLayouts[0]};
  for (const LargeCase& large : kLargeCases) {
    const expect::Case what(large.what);
    for (const Method& method : {kMomentum[0], kAdam[0]}) {
      check({integer_problem(Element::kFloat, Element::kFloat, large.sizes, kAllContiguous,
                             large.diagonal, method)},
            method);
      if (!kSanitized) {
        check({integer_problem(Element::kDouble, Element::kHalf, large.sizes, strided,
                               large.diagonal, method)},
              method);
      }
    }
  }
  // Small ones among large ones, which take turns; strided elements in pieces on many threads.
  std::vector<Problem> together;
  for (const size_t i : {1u, 5u}) {
    const LargeCase& large = kLargeCases[i];
    const Element grad = i == 5 ? Element::kBFloat16 : Element::kFloat;
    together.push_back(
        integer_problem(Element::kFloat, grad, large.sizes, strided, large.diagonal, kAdam[0]));
    for (const Shape& sizes : kChainShapes) {
      const std::vector<bool> kinds(sizes.size(), false);
      together.push_back(
          integer_problem(Element::kFloat, grad, sizes, strided, kinds, kAdam[0], 2));
    }
  }
  check(together, kAdam[0]);
}

// No elements: no length, and no direction that would need one.
void check_empty() {
  tnt::grafted_directions({}, {0.5, 0.75, 0}, nullptr);
  for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {4, 0}, {4, 0, 3}, {0, 0}, {1, 0}}) {
    for (const Element state : {Element::kFloat, Element::kDouble}) {
      const std::vector<bool> kinds(sizes.size(), sizes[0] == 0);
      for (const Method& method : {kMomentum[0], kAdam[0]}) {
        std::vector<Problem> problems = {
            integer_problem(state, Element::kHalf, sizes, kAllContiguous, kinds, method)};
        check(problems, method);
        EXPECT(call(problems, method) == Values{0});
      }
    }
  }
}

// A direction of zero has no multiple of any other length.
void check_zero() {
  for (const Method& method : {kMomentum[0], kAdam[0]}) {
    std::vector<Problem> problems;
    for (int i = 0; i < 3; ++i) {
      problems.push_back(integer_problem(Element::kFloat, Element::kFloat, {9, 31}, kAllContiguous,
                                         {true, false}, method));
    }
    problems[1].factors[0] = Tensor(Element::kFloat, {9}, Values(9, 0));
    check(problems, method);
    const Values scales = call(problems, method);
    EXPECT(scales[0] > 0 && scales[1] == 0 && scales[2] > 0);
    EXPECT(problems[1].out.values() == Values(9 * 31, 0));
  }
}

// Squares beyond float's range, on either side of it.
void check_range() {
  for (const int power : {83, -83}) {
    const expect::Case name("2^" + std::to_string(power));
    Values grads = integers(9 * 31, 3, 3);
    for (double& value : grads) value = std::ldexp(value, power);
    for (const Layout& layout : {kContiguous, kLayouts[5]}) {
      std::vector<Problem> problems = {
          {Tensor(Element::kFloat, {9, 31}, Values(grads.size(), 0), layout),
           Tensor(Element::kFloat, {9, 31}, Values(grads.size(), 0)),
           Tensor(Element::kFloat, {9, 31}, grads),
           {Tensor(Element::kFloat, {9}, Values(9, 0x1p20)),
            Tensor(Element::kFloat, {31}, Values(31, 0x1p-10))},
           Tensor(Element::kFloat, {9, 31}, Values(grads.size(), kNaN)),
           {1, 1}}};
      EXPECT(call(problems, kMomentum[0]) == Values{0x1p-10});
      EXPECT(problems[0].momentum.values() == grads);
    }
  }
}

// With sums that do round: two runs on three threads agree to the bit, and one on a single thread
// up to the roundings of another order of a product's sums. Diagonal factors have none, and the
// lengths' are cut at the same places: there it is the bits again.
void check_rounding() {
  const std::vector<Shape> shapes = {{401, 99}, {31, 33, 40}, {300}, {65, 9}, {561, 563}};
  const Method method{true, 0.9, 0.99, 1e-8};
  for (const Element grad : kElements) {
    const Element state = state_of(grad);
    const expect::Case name(name_of(grad));
    for (const bool diagonal : {false, true}) {
      std::vector<Problem> first;
      for (const Shape& sizes : shapes) {
        if (count_of(sizes) > 300000 && !diagonal) continue;
        const int64_t count = count_of(sizes);
        const Layout& layout = sizes.size() == 3 ? kLayouts[5] : kContiguous;
        Values squares = reals(count, 4);
        for (double& value : squares) value *= value;
        first.push_back({Tensor(state, sizes, reals(count, 2), layout),
                         Tensor(state, sizes, squares, layout),
                         Tensor(grad, sizes, reals(count, 3)),
                         integer_factors(grad, sizes, std::vector<bool>(sizes.size(), diagonal)),
                         Tensor(state, sizes, Values(static_cast<size_t>(count), kNaN)),
                         {3, 5}});
      }
      const std::vector<Problem> before = first;
      std::vector<Problem> second = first, alone = first;
      const Values scales = call(first, method), again = call(second, method);
      Values single;
      {
        const OneThread here;
        single = call(alone, method);
      }
      EXPECT(scales == again);
      if (diagonal) EXPECT(scales == single);
      for (size_t t = 0; t < first.size(); ++t) {
        const expect::Case sizes(name_of(first[t].momentum.sizes()));
        EXPECT(first[t].momentum.memory() == second[t].momentum.memory());
        EXPECT(first[t].second_moment.memory() == second[t].second_moment.memory());
        EXPECT(first[t].out.memory() == second[t].out.memory());
        EXPECT(first[t].momentum.memory() == alone[t].momentum.memory());
        EXPECT(first[t].second_moment.memory() == alone[t].second_moment.memory());
        if (diagonal) EXPECT(first[t].out.memory() == alone[t].out.memory());
        const Expected expected = definition(before[t], method);
        const double spacing = 32 * epsilon_of(state);
        const double bound = spacing * largest_of(expected.direction);
        EXPECT_AT_MOST(distance(first[t].out.values(), expected.direction), bound);
        EXPECT_AT_MOST(distance(alone[t].out.values(), expected.direction), bound);
        EXPECT_AT_MOST(distance(first[t].second_moment.values(), expected.second_moment), spacing);
        EXPECT_AT_MOST(std::abs(scales[t] - expected.scale), spacing * expected.scale);
        EXPECT_AT_MOST(std::abs(single[t] - expected.scale), spacing * expected.scale);
      }
    }
  }
}

}  // namespace

int main() {
  use_three_threads();
  check_layouts();
  check_alone();
  check_blocks();
  check_large();
  check_empty();
  check_zero();
  check_range();
  check_rounding();
  return expect::finish();
}
