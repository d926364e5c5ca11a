// The Gram kernel against its definition, loops in double. Values are small integers and decays
// multiples of 1/4, so that every sum is exact in float in any order: the results must be equal.
// Whitened Gram matrices have a scale that is not exact.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "bfloat16_products.h"
#include "chain_definition.h"
#include "cpu/operators.h"
#include "expect.h"
#include "tensors.h"
#include "threads.h"

namespace {

// Whether floats may be rounded to bfloat16: these integers are the same there.
bool may_round = false;

// A tensor and a statistic for each of its modes; diagonal[i] says what kind.
struct Problem {
  Tensor tensor;
  std::vector<bool> diagonal;
  std::vector<Tensor> stats;
};

Values symmetric_integers(int64_t d, unsigned seed) {
  Values matrix = integers(d * d, 8, seed);
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < r; ++c) matrix[c * d + r] = matrix[r * d + c];
  }
  return matrix;
}

Problem make(Tensor tensor, const std::vector<bool>& diagonal) {
  Problem problem{std::move(tensor), diagonal, {}};
  const Shape& sizes = problem.tensor.sizes();
  const Element state = state_of(problem.tensor.element());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t d = sizes[i];
    const auto seed = static_cast<unsigned>(i) + 2;
    problem.stats.push_back(diagonal[i] ? Tensor(state, {d}, integers(d, 8, seed))
                                        : Tensor(state, {d, d}, symmetric_integers(d, seed)));
  }
  return problem;
}

Problem integer_problem(Element element, const Shape& sizes, const Layout& layout,
                        const std::vector<bool>& diagonal) {
  return make(Tensor(element, sizes, integers(count_of(sizes), 3, 1), layout), diagonal);
}

void call(std::vector<Problem>& problems, double decay) {
  std::vector<tnt::GramMode> modes;
  for (Problem& problem : problems) {
    for (size_t i = 0; i < problem.stats.size(); ++i) {
      modes.push_back({problem.tensor.view(), static_cast<int64_t>(i), problem.stats[i].data(),
                       problem.diagonal[i]});
    }
  }
  tnt::gram_ema(modes, decay, may_round);
}

// mat_i(G), its rows one after the other.
Values unfolding(const Tensor& tensor, size_t mode) {
  const Shape& sizes = tensor.sizes();
  const Values values = tensor.values();
  const int64_t d = sizes[mode];
  int64_t before = 1, after = 1;
  for (size_t i = 0; i < mode; ++i) before *= sizes[i];
  for (size_t i = mode + 1; i < sizes.size(); ++i) after *= sizes[i];
  Values rows;
  rows.reserve(values.size());
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t a = 0; a < before; ++a) {
      for (int64_t b = 0; b < after; ++b) rows.push_back(values[(a * d + r) * after + b]);
    }
  }
  return rows;
}

// decay S + (1 - decay) mat_i(G) mat_i(G)^T, or the diagonal of it.
Values definition(const Tensor& tensor, size_t mode, bool diagonal, const Values& stat,
                  double decay) {
  const int64_t d = tensor.sizes()[mode], columns = d == 0 ? 0 : tensor.count() / d;
  const Values rows = unfolding(tensor, mode);
  Values result(stat.size());
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = diagonal ? r : 0; c <= r; ++c) {
      const double sum = dot(rows.data() + r * columns, rows.data() + c * columns, columns);
      const int64_t here = diagonal ? r : r * d + c, there = diagonal ? r : c * d + r;
      // Decay 0 does not read the old statistic.
      result[here] = (decay == 0 ? 0 : decay * stat[here]) + (1 - decay) * sum;
      result[there] = result[here];
    }
  }
  return result;
}

// What must not count before the call is NaN: all of S if the decay is 0, else what lies above its
// diagonal.
void poison(Problem& problem, double decay) {
  for (Tensor& stat : problem.stats) {
    Values values = stat.values();
    const int64_t d = stat.sizes()[0];
    if (decay == 0) values.assign(values.size(), kNaN);
    for (int64_t r = 0; r < d && stat.sizes().size() == 2; ++r) {
      for (int64_t c = r + 1; c < d; ++c) values[r * d + c] = kNaN;
    }
    stat = Tensor(stat.element(), stat.sizes(), values);
  }
}

void check(std::vector<Problem> problems, double decay) {
  std::vector<Problem> results = problems;
  for (Problem& problem : results) poison(problem, decay);
  call(results, decay);
  const expect::Case with_decay("decay " + std::to_string(decay));
  for (size_t t = 0; t < problems.size(); ++t) {
    const Tensor& tensor = problems[t].tensor;
    const expect::Case name(name_of(tensor.element()) + name_of(tensor.sizes()));
    for (size_t i = 0; i < problems[t].stats.size(); ++i) {
      const expect::Case mode("mode " + std::to_string(i));
      const bool diagonal = problems[t].diagonal[i];
      const Values old = problems[t].stats[i].values();
      const Values wanted = definition(tensor, i, diagonal, old, decay);
      EXPECT(results[t].stats[i].values() == wanted);
    }
    EXPECT(results[t].tensor.memory() == tensor.memory());
  }
}

void check_layouts() {
  int turn = 0, layouts = 0;
  const auto check_layout = [&](const Layout& layout) {
    const expect::Case name(layout.name);
    ++layouts;
    for (const Element element : kElements) {
      std::vector<Problem> problems;
      for (const Shape& sizes : kShapes) {
        std::vector<bool> diagonal(sizes.size());
        for (size_t i = 0; i < sizes.size(); ++i) diagonal[i] = (turn >> i) % 3 == 0;
        ++turn;
        problems.push_back(integer_problem(element, sizes, layout, diagonal));
      }
      check(problems, 0.25 * ((layouts + static_cast<int>(element)) % 4));
    }
  };
  for (const Layout& layout : kLayouts) check_layout(layout);
  for (const Layout& layout : kSharingLayouts) check_layout(layout);
}

// A call of its own for each, with every decay: nothing else shares the threads with it.
void check_alone() {
  for (const Shape& sizes : kShapes) {
    for (const bool diagonal : {false, true}) {
      for (const double decay : {0.0, 0.25, 0.75}) {
        const std::vector<bool> kinds(sizes.size(), diagonal);
        check({integer_problem(Element::kFloat, sizes, kContiguous, kinds)}, decay);
      }
    }
  }
}

// Sizes that are cut: statistics into tiles, columns into pieces, the former among many threads.
void check_cuts() {
  struct Cut {
    const char* what;
    Shape sizes;
    std::vector<bool> diagonal;
    int layout;
    Element element;
    double decay;
  };
  constexpr Element kFloat = Element::kFloat, kDouble = Element::kDouble;
  const std::vector<Cut> cuts = {
      {"2 x 2 tiles, read where they lie", {401, 200}, {false, false}, 0, kFloat, 0.25},
      {"2 x 2 tiles, transposed", {401, 45}, {false, false}, 1, kDouble, 0.0},
      {"2 x 2 tiles, columns in two pieces", {401, 200}, {false, false}, 5, kFloat, 0.75},
      {"2 x 2 tiles, converted", {385, 45}, {false, true}, 0, Element::kBFloat16, 0.25},
      {"3 x 3 tiles", {577, 9, 5}, {false, false, false}, 3, kFloat, 0.25},
      {"4 x 4 tiles, the last of them small", {769, 30}, {false, false}, 0, kFloat, 0.25},
      {"3 x 3 tiles, decay 0", {577, 5, 9}, {false, false, false}, 4, kFloat, 0.0},
      {"no column, and tiles", {577, 0}, {false, false}, 0, kFloat, 0.25},
      {"9 rows, pieces gathered", {9, 8000}, {false, true}, 0, kFloat, 0.25},
      {"9 columns, pieces read where they lie", {13000, 9}, {true, false}, 0, kFloat, 0.25},
      {"32 columns, pieces", {1000, 32}, {true, false}, 0, kFloat, 0.75},
      {"33 columns, pieces", {4000, 33}, {true, false}, 0, kDouble, 0.25},
      {"160 rows, pieces gathered", {160, 200}, {false, true}, 0, kFloat, 0.25},
      {"161 rows, pieces gathered", {161, 420}, {false, true}, 5, kFloat, 0.25},
      {"many small sums", {257, 300}, {true, true}, 2, Element::kHalf, 0.25},
      {"middle modes in pieces", {40, 33, 60}, {true, false, false}, 0, kFloat, 0.25},
  };
  for (const Cut& cut : cuts) {
    const expect::Case what(cut.what);
    const Problem problem =
        integer_problem(cut.element, cut.sizes, kLayouts[cut.layout], cut.diagonal);
    check({problem}, cut.decay);
    const OneThread here;
    check({problem}, cut.decay);
  }
}

// decay S + (1 - decay) |G|^2 / tr H H with H = mat_i(G x_{j != i} A_j) mat_i(G)^T, or its
// diagonal.
Values whitened_definition(const Tensor& tensor, size_t mode, bool diagonal, const Values& stat,
                           std::vector<Tensor> factors, double decay) {
  const Shape& sizes = tensor.sizes();
  const int64_t d = sizes[mode], columns = d == 0 ? 0 : tensor.count() / d;
  factors[mode] = Tensor(state_of(tensor.element()), {d}, Values(static_cast<size_t>(d), 1.0));
  const Tensor product(Element::kDouble, sizes, chain(tensor.values(), sizes, factors));
  const Values left = unfolding(product, mode), right = unfolding(tensor, mode);
  const double trace = dot(left.data(), right.data(), tensor.count());
  const double squares = dot(right.data(), right.data(), tensor.count());
  const double scale = trace <= 0 ? 0 : squares / trace;
  Values result(stat.size());
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < d; ++c) {
      if (diagonal && r != c) continue;
      const double sum = dot(left.data() + r * columns, right.data() + c * columns, columns);
      const int64_t here = diagonal ? r : r * d + c;
      result[here] = (decay == 0 ? 0 : decay * stat[here]) + (1 - decay) * scale * sum;
    }
  }
  return result;
}

void check_whitened(Element element, const Shape& sizes, const Layout& layout,
                    const std::vector<bool>& diagonal, double decay) {
  const expect::Case name(name_of(element) + name_of(sizes) + " " + layout.name);
  const Problem problem = integer_problem(element, sizes, layout, diagonal);
  // Whether a factor is diagonal does not depend on its statistic.
  std::vector<bool> others = diagonal;
  others.flip();
  std::vector<Tensor> factors = integer_factors(element, sizes, others);
  Problem result = problem;
  poison(result, decay);
  tnt::WhitenedTensor whitened{result.tensor.view(), views_of(factors), {}, diagonal};
  for (Tensor& stat : result.stats) whitened.stats.push_back(stat.data());
  tnt::whitened_gram_ema({whitened}, decay, may_round);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const expect::Case mode("mode " + std::to_string(i));
    const Values wanted = whitened_definition(problem.tensor, i, diagonal[i],
                                              problem.stats[i].values(), factors, decay);
    const double exact = 16 * epsilon_of(state_of(element));
    const double allowed = may_round ? 6 * 0x1p-9 : exact;  // of bfloat16 products
    EXPECT_AT_MOST(distance(result.stats[i].values(), wanted),
                   allowed * largest_of(wanted) + 1e-30);
  }
  EXPECT(result.tensor.memory() == problem.tensor.memory());
}

void check_whitened() {
  tnt::whitened_gram_ema({}, 0.5, false);
  int turn = 0;
  for (const Layout& layout : kLayouts) {
    for (const Element element : kElements) {
      for (const Shape& sizes : kShapes) {
        std::vector<bool> diagonal(sizes.size());
        for (size_t i = 0; i < sizes.size(); ++i) diagonal[i] = (turn >> i) % 3 == 0;
        check_whitened(element, sizes, layout, diagonal, 0.25 * (turn % 4));
        ++turn;
      }
    }
  }
  // Tiles and pieces; all threads for one mode, and one for each.
  for (const Shape& sizes : std::vector<Shape>{
           {401, 200}, {577, 45}, {90, 70, 3}, {3, 160, 66}, {65, 2, 64}, {4, 0, 3}, {0, 2}}) {
    check_whitened(Element::kFloat, sizes, kContiguous, std::vector<bool>(sizes.size()), 0.25);
    const OneThread here;
    check_whitened(Element::kFloat, sizes, kContiguous, std::vector<bool>(sizes.size()), 0.25);
  }
}

void check_empty() {
  tnt::gram_ema({}, 0.5, false);
  for (const Shape& sizes :
       std::vector<Shape>{{0}, {0, 3}, {4, 0}, {4, 0, 3}, {0, 0}, {2, 200, 0}}) {
    for (const bool diagonal : {false, true}) {
      for (const double decay : {0.0, 0.75}) {
        for (const Element element : kElements) {
          const std::vector<bool> kinds(sizes.size(), diagonal);
          check({integer_problem(element, sizes, kContiguous, kinds)}, decay);
        }
      }
    }
  }
}

// In float, a sum that has reached 1 would take no more squares of 2^-13.
void check_diagonal_sum() {
  Values values(40000, 0x1p-13);
  values[0] = 1;
  std::vector<Problem> problems = {make(Tensor(Element::kFloat, {1, 40000}, values), {true, true})};
  call(problems, 0);
  EXPECT(problems[0].stats[0].values()[0] == static_cast<float>(1 + 39999 * 0x1p-26));
}

}  // namespace

int main() {
  use_three_threads();
  const auto check_all = [] {
    check_layouts();
    check_alone();
    check_cuts();
    check_empty();
    check_whitened();
    check_diagonal_sum();
  };
  check_all();
  const BFloat16Products rounded;
  may_round = true;
  check_all();
  return expect::finish();
}
