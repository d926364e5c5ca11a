// Chained mode products against the definition written as loops in double. All values are small
// integers, so that every sum is exact in float, in whatever order it is taken: the results must be
// equal.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "chain_definition.h"
#include "cpu/mode_products.h"
#include "expect.h"
#include "tensors.h"
#include "threads.h"

namespace {

struct Problem {
  Tensor tensor;
  std::vector<Tensor> factors;
  Tensor out;
};

Problem make(Tensor tensor, std::vector<Tensor> factors) {
  const Element state = state_of(tensor.element());
  Tensor out(state, tensor.sizes(), Values(static_cast<size_t>(tensor.count()), kNaN));
  return {std::move(tensor), std::move(factors), std::move(out)};
}

Problem integer_problem(Element element, const Shape& sizes, const Layout& layout,
                        const std::vector<bool>& diagonal) {
  return make(Tensor(element, sizes, integers(count_of(sizes), 3, 1), layout),
              integer_factors(element, sizes, diagonal));
}

void call(std::vector<Problem>& problems) {
  std::vector<tnt::ModeProduct> products;
  for (Problem& problem : problems) {
    products.push_back({problem.tensor.view(), views_of(problem.factors), problem.out.data()});
  }
  tnt::mode_products(products);
  EXPECT(keeps_subnormals());
}

void check(std::vector<Problem> problems) {
  const std::vector<Problem> before = problems;
  call(problems);
  for (size_t t = 0; t < problems.size(); ++t) {
    const Tensor& tensor = before[t].tensor;
    const expect::Case name(name_of(tensor.element()) + name_of(tensor.sizes()));
    const Values values = tensor.values();
    EXPECT(chain_bound(values, tensor.sizes(), before[t].factors) < kExact);
    EXPECT(problems[t].out.values() == chain(values, tensor.sizes(), before[t].factors));
    EXPECT(problems[t].tensor.memory() == tensor.memory());
    for (size_t i = 0; i < before[t].factors.size(); ++i) {
      EXPECT(problems[t].factors[i].memory() == before[t].factors[i].memory());
    }
  }
}

void check_layouts() {
  int turn = 0;
  const auto check_layout = [&](const Layout& layout) {
    const expect::Case name(layout.name);
    for (const Element element : kElements) {
      std::vector<Problem> problems;
      for (const Shape& sizes : kChainShapes) {
        std::vector<bool> diagonal(sizes.size());
        for (size_t i = 0; i < sizes.size(); ++i) diagonal[i] = (turn >> i) % 3 == 0;
        ++turn;
        problems.push_back(integer_problem(element, sizes, layout, diagonal));
      }
      check(problems);
    }
  };
  for (const Layout& layout : kLayouts) check_layout(layout);
  for (const Layout& layout : kSharingLayouts) check_layout(layout);
}

void check_alone() {
  for (const Shape& sizes : kChainShapes) {
    for (const bool diagonal : {false, true}) {
      const std::vector<bool> kinds(sizes.size(), diagonal);
      check({integer_problem(Element::kFloat, sizes, kContiguous, kinds)});
    }
  }
}

void check_large() {
  std::vector<Problem> together;
  for (const LargeCase& large : kLargeCases) {
    const expect::Case what(large.what);
    check({integer_problem(Element::kFloat, large.sizes, kContiguous, large.diagonal)});
    if (!kSanitized) {
      check({integer_problem(Element::kDouble, large.sizes, kLayouts[1], large.diagonal)});
      check({integer_problem(Element::kHalf, large.sizes, kLayouts[5], large.diagonal)});
    }
  }
  // Small ones among large ones, which take turns.
  for (const size_t i : {0u, 4u, 5u}) {
    const LargeCase& large = kLargeCases[i];
    const Element element = i == 4 ? Element::kBFloat16 : Element::kFloat;
    together.push_back(integer_problem(element, large.sizes, kLayouts[i], large.diagonal));
    for (const Shape& sizes : kChainShapes) {
      const std::vector<bool> kinds(sizes.size(), false);
      together.push_back(integer_problem(element, sizes, kLayouts[i], kinds));
    }
  }
  check(together);
}

// Thousands of small products side by side, of unlike sizes that no vector's length divides: a BLAS
// that keeps anything of a call in memory of its own (see blas.h) can show it here.
void check_many() {
  const std::vector<Shape> shapes = {{21, 10}, {10, 21}, {17, 33}, {33, 5}, {40, 9}, {3, 70}};
  std::vector<Problem> problems;
  for (int i = 0; i < (kSanitized ? 40 : 400); ++i) {
    for (const Shape& sizes : shapes) {
      problems.push_back(integer_problem(Element::kFloat, sizes, kContiguous, {false, false}));
    }
  }
  check(problems);
}

void check_empty() {
  tnt::mode_products({});
  for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {4, 0}, {4, 0, 3}, {0, 0}, {1, 0}}) {
    for (const bool diagonal : {false, true}) {
      for (const Element element : kElements) {
        const std::vector<bool> kinds(sizes.size(), diagonal);
        check({integer_problem(element, sizes, kContiguous, kinds)});
      }
    }
  }
}

// NaN and infinity reach what depends on them and nothing else, here through diagonal factors.
void check_not_finite() {
  for (const double bad : {kNaN, kInfinity}) {
    Values values(70 * 40, 1);
    values[41] = bad;
    std::vector<Problem> problems = {make(Tensor(Element::kFloat, {70, 40}, values),
                                          {Tensor(Element::kFloat, {70}, Values(70, 2)),
                                           Tensor(Element::kFloat, {40}, Values(40, 3))})};
    call(problems);
    const Values out = problems[0].out.values();
    bool good = true;
    for (size_t i = 0; i < out.size(); ++i) good = good && (i == 41) == !std::isfinite(out[i]);
    EXPECT(good);
  }
}

// With sums that do round: two runs on three threads agree to the bit, and one on a single thread
// up to the roundings of another order.
void check_rounding() {
  const std::vector<Shape> shapes = {{401, 99}, {31, 33, 40}, {300}, {65, 9}};
  for (const Element element : kElements) {
    const expect::Case name(name_of(element));
    std::vector<Problem> first;
    for (const Shape& sizes : shapes) {
      std::vector<Tensor> factors;
      for (const int64_t d : sizes) {
        Values values = reals(d * d, 5);
        for (int64_t r = 0; r < d; ++r) {
          for (int64_t c = 0; c < r; ++c) values[c * d + r] = values[r * d + c];
        }
        factors.emplace_back(state_of(element), Shape{d, d}, values);
      }
      first.push_back(make(Tensor(element, sizes, reals(count_of(sizes), 4)), factors));
    }
    std::vector<Problem> second = first, alone = first;
    call(first);
    call(second);
    {
      const OneThread here;
      call(alone);
    }
    for (size_t t = 0; t < first.size(); ++t) {
      const expect::Case sizes(name_of(shapes[t]));
      EXPECT(first[t].out.memory() == second[t].out.memory());
      const Values values = first[t].out.values();
      const Values wanted = chain(first[t].tensor.values(), shapes[t], first[t].factors);
      const double bound = 32 * epsilon_of(element) * largest_of(wanted);
      EXPECT_AT_MOST(distance(values, wanted), bound);
      EXPECT_AT_MOST(distance(alone[t].out.values(), wanted), bound);
    }
  }
}

}  // namespace

int main() {
  use_three_threads();
  check_layouts();
  check_alone();
  check_large();
  check_many();
  check_empty();
  check_not_finite();
  check_rounding();
  return expect::finish();
}
