// mode_products, preconditioned_step and grafted_directions against their definition, loops in
// double. Values are small integers and rates powers of two, so that every number before a last
// rounding is exact in float, in whatever order sums run: the results must be equal. Of the norm of
// Adam's direction the last few operations round.

#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "bfloat16_products.h"
#include "chain_definition.h"
#include "cpu/operators.h"
#include "expect.h"
#include "tensors.h"
#include "threads.h"

namespace {

bool may_round = false;  // floats to bfloat16

// kLength and kAdam: grafted_directions, by whose length.
enum class Operation { kProducts, kStep, kLength, kAdam };
using enum Operation;
constexpr Operation kOperations[] = {kProducts, kStep, kLength, kAdam};

struct Method {
  Operation operation;
  double momentum, lr, weight_decay;  // of the step
  double second_decay, eps;           // of Adam
  bool nesterov = false;

  bool grafts() const { return operation == kLength || operation == kAdam; }
};

// The root of a second moment's bias correction is exact: either eps is 0, or the second moment has
// had one update and keeps 3/4.
constexpr Method kMethods[] = {
    {kProducts, 0, 0, 0, 0, 0},        {kStep, 0.5, 0.25, 0.5, 0, 0},
    {kStep, 0.5, 0.25, 0, 0, 0},       {kStep, 0, 0.25, 0.5, 0, 0},
    {kStep, 0.5, 0, 0.5, 0, 0},        {kStep, 1, 1, 0, 0, 0},
    {kLength, 0.5, 0, 0, 0.75, 0},     {kLength, 0, 0, 0, 0.75, 0},
    {kLength, 1, 0, 0, 0.75, 0},       {kAdam, 0.5, 0, 0, 0.75, 0},
    {kAdam, 0.5, 0, 0, 0.75, 2},       {kAdam, 0, 0, 0, 0.75, 0},
    {kAdam, 0.5, 0, 0, 0, 0},          {kLength, 0.5, 0, 0, 0.75, 0, true},
    {kAdam, 0.5, 0, 0, 0.75, 0, true}, {kAdam, 0.5, 0, 0, 0.75, 2, true},
};
constexpr double kExactInDouble = 0x1p53;
constexpr double kLastRoundings = 16 * std::numeric_limits<double>::epsilon();

std::vector<Method> methods_of(Operation operation) {
  std::vector<Method> found;
  for (const Method& method : kMethods) {
    if (method.operation == operation) found.push_back(method);
  }
  return found;
}

std::string describe(const Method& method) {
  const char* names[] = {"products", "step", "length", "Adam"};
  return names[static_cast<int>(method.operation)] + std::string(", momentum ") +
         std::to_string(method.momentum) + ", lr " + std::to_string(method.lr) + ", weight decay " +
         std::to_string(method.weight_decay) + ", second decay " +
         std::to_string(method.second_decay) + ", eps " + std::to_string(method.eps) +
         (method.nesterov ? ", Nesterov" : "");
}

// All that any of them reads or writes; mode_products reads the gradient.
struct Problem {
  Tensor param, momentum, second_moment, grad;
  std::vector<Tensor> factors;
  Tensor out;
  double counts[2] = {1, 1};

  const Shape& sizes() const { return grad.sizes(); }
  Element state() const { return out.element(); }
};

struct Layouts {
  Layout param = kContiguous, momentum = kContiguous, second_moment = kContiguous,
         grad = kContiguous;
};

// v, of which 3/4 v + 1/4 g^2 = s^2 with s 1, 2 or 4; 1 where eps is added to it.
Values second_moments(const Values& grad, const Method& method) {
  const Values draws = integers(static_cast<int64_t>(grad.size()), 1, 4);
  Values values(grad.size());
  for (size_t i = 0; i < grad.size(); ++i) {
    const double root = method.eps == 0 ? std::ldexp(1.0, static_cast<int>(draws[i]) + 1) : 1;
    values[i] = (4 * root * root - grad[i] * grad[i]) / 3;
  }
  return values;
}

std::vector<bool> all(const Shape& sizes, bool diagonal) {
  return std::vector<bool>(sizes.size(), diagonal);
}

Problem integer_problem(const Method& method, Element element, Element grad, const Shape& sizes,
                        const std::vector<bool>& diagonal, const Layouts& layouts = {},
                        double updates = 1) {
  const int64_t count = count_of(sizes);
  if (method.operation == kProducts) element = grad;
  const Element state = state_of(element);
  Values gradients = integers(count, 3, 3);
  for (double& value : gradients) {
    if (method.grafts()) value = value > 0 ? 1 : value < -1 ? 2 : -1;  // no zeros
  }
  const Tensor g(grad, sizes, gradients, layouts.grad);
  return {Tensor(element, sizes, integers(count, 8, 1), layouts.param),
          Tensor(state, sizes, integers(count, 3, 2), layouts.momentum),
          Tensor(state, sizes, second_moments(g.values(), method), layouts.second_moment),
          g,
          integer_factors(state, sizes, diagonal),
          Tensor(state, sizes, Values(static_cast<size_t>(count), kNaN)),
          {updates, method.eps == 0 ? 2 * updates : 1}};
}

Values call(const Method& method, std::vector<Problem>& problems) {
  Values norms(2 * problems.size(), kNaN);
  if (method.operation == kProducts) {
    std::vector<tnt::ModeProduct> products;
    for (Problem& p : problems) {
      products.push_back({p.grad.view(), views_of(p.factors), p.out.data()});
    }
    tnt::mode_products(products, may_round);
  } else if (method.operation == kStep) {
    std::vector<tnt::ParameterStep> steps;
    for (Problem& p : problems) {
      steps.push_back({p.param.view(), p.momentum.view(), p.grad.view(), views_of(p.factors)});
    }
    tnt::preconditioned_step(steps, method.lr, method.momentum, method.weight_decay, may_round);
  } else {
    std::vector<tnt::GraftedDirection> directions;
    for (Problem& p : problems) {
      const bool adam = method.operation == kAdam;
      directions.push_back({p.momentum.view(),
                            adam ? p.second_moment.view() : tnt::TensorView{},
                            p.grad.view(),
                            views_of(p.factors),
                            p.out.data(),
                            {p.counts[0], p.counts[1]}});
    }
    tnt::grafted_directions(
        directions, {method.momentum, method.second_decay, method.eps, method.nesterov, may_round},
        norms.data());
  }
  EXPECT(keeps_subnormals());
  return norms;
}

struct Expected {
  Values param, momentum, ahead, second_moment, direction;
  double norms[2];
};

// Long double: there are many terms, and not every sum is exact in double.
UNWATCHED double sum_of_squares(const Values& values) {
  long double sum = 0;
  for (const double value : values) sum += static_cast<long double>(value) * value;
  return static_cast<double>(sum);
}

// m <- mu m + g;  v <- d v + (1 - d) g^2;  P = n x_1 A_1 ... x_k A_k, n = m or, with Nesterov,
// mu m + g;  W <- W - lr (P + weight_decay W);  |R|, |P| with R = n, or n^ / (sqrt(v^) + eps) of
// Adam, where n^ = (1 - mu) / (1 - mu^t) n, t the powers of mu that n sums, v^ = v / (1 - d^t).
Expected definition(const Method& method, const Problem& problem) {
  const Values start = problem.grad.values();
  Expected to{problem.param.values(), start, start, problem.second_moment.values(), {}, {}};
  const Values grad = problem.grad.values(), old = problem.momentum.values();
  const double powers = problem.counts[0] + (method.nesterov ? 1 : 0);
  const double first = (1 - method.momentum) / (1 - std::pow(method.momentum, powers));
  const double second = 1 - std::pow(method.second_decay, problem.counts[1]);
  long double sum = 0;
  for (size_t i = 0; i < grad.size() && method.operation != kProducts; ++i) {
    to.momentum[i] = method.momentum * old[i] + grad[i];
    to.ahead[i] = method.nesterov ? method.momentum * to.momentum[i] + grad[i] : to.momentum[i];
    long double other = to.ahead[i];
    if (method.operation == kAdam) {
      to.second_moment[i] =
          method.second_decay * to.second_moment[i] + (1 - method.second_decay) * grad[i] * grad[i];
      const long double root = std::sqrt(static_cast<long double>(to.second_moment[i]) / second);
      other = first * to.ahead[i] / (root + method.eps);
    }
    sum += other * other;
  }
  to.direction = chain(to.ahead, problem.sizes(), problem.factors);
  for (size_t i = 0; i < grad.size(); ++i) {
    to.param[i] -= method.lr * (to.direction[i] + method.weight_decay * to.param[i]);
  }
  to.norms[0] = std::sqrt(static_cast<double>(sum));
  to.norms[1] = std::sqrt(sum_of_squares(to.direction));
  return to;
}

Values rounded(Element element, const Values& values) {
  return Tensor(element, {static_cast<int64_t>(values.size())}, values).values();
}

// A tensor holds these values and its gaps are as before, or it is as before altogether.
void expect_tensor(const Tensor& fresh, const Tensor& old, bool written, const Values& values) {
  if (written) {
    EXPECT(fresh.values() == values);
    EXPECT(fresh.gaps_untouched());
  } else {
    EXPECT(fresh.memory() == old.memory());
  }
}

void check(const Method& method, std::vector<Problem> problems) {
  const std::vector<Problem> before = problems;
  const Values norms = call(method, problems);
  for (size_t t = 0; t < problems.size(); ++t) {
    const Problem &old = before[t], &fresh = problems[t];
    const expect::Case name(describe(method) + ", " + name_of(old.param.element()) +
                            name_of(old.sizes()) + ", " + name_of(old.grad.element()) +
                            " gradient");
    const Expected wanted = definition(method, old);
    // The finest digit of a momentum is 1/2, one gradient ahead 1/4, of a parameter's change 1/8.
    const double digits = method.operation == kStep ? 8 : method.nesterov ? 4 : 2;
    EXPECT(digits * chain_bound(wanted.ahead, old.sizes(), old.factors) < kExact);
    const bool products = method.operation == kProducts, step = method.operation == kStep;
    expect_tensor(fresh.param, old.param, step, rounded(old.param.element(), wanted.param));
    expect_tensor(fresh.momentum, old.momentum, !products, wanted.momentum);
    expect_tensor(fresh.second_moment, old.second_moment, method.operation == kAdam,
                  wanted.second_moment);
    expect_tensor(fresh.out, old.out, !step, wanted.direction);
    expect_tensor(fresh.grad, old.grad, false, {});
    for (size_t i = 0; i < old.factors.size(); ++i) {
      expect_tensor(fresh.factors[i], old.factors[i], false, {});
    }
    if (method.grafts()) {
      EXPECT(digits * digits * sum_of_squares(wanted.direction) < kExactInDouble);
      const double bound = method.operation == kAdam ? kLastRoundings * wanted.norms[0] : 0;
      EXPECT_AT_MOST(std::abs(norms[2 * t] - wanted.norms[0]), bound);
      EXPECT(norms[2 * t + 1] == wanted.norms[1]);
    }
  }
}

// Each layout of each tensor, with several layouts of the other tensors, all shapes in one call.
void check_layouts() {
  std::vector<Layout> readable(std::begin(kLayouts), std::end(kLayouts));
  readable.insert(readable.end(), std::begin(kSharingLayouts), std::end(kSharingLayouts));
  int turn = 0;
  for (size_t i = 0; i < (kSanitized ? 9 : 18); ++i) {
    const Layouts layouts{kLayouts[i % 6], kLayouts[(5 * i + i / 6) % 6],
                          kLayouts[(i + i / 6 + 2) % 6], readable[(4 * i + i / 6) % 9]};
    const expect::Case name(std::string(layouts.param.name) + ", " + layouts.momentum.name + ", " +
                            layouts.second_moment.name + ", " + layouts.grad.name);
    for (const Operation operation : kOperations) {
      const std::vector<Method> methods = methods_of(operation);
      for (const Element element : kElements) {
        const Method& method = methods[(i + static_cast<size_t>(element)) % methods.size()];
        std::vector<Problem> problems;
        for (const Shape& sizes : kShapes) {
          std::vector<bool> diagonal(sizes.size());
          for (size_t mode = 0; mode < sizes.size(); ++mode) {
            diagonal[mode] = (turn >> mode) % 3 == 0;
          }
          const Element grad = operation == kProducts ? element : kElements[turn++ % 4];
          problems.push_back(
              integer_problem(method, element, grad, sizes, diagonal, layouts, 1 + turn++ % 5));
        }
        check(method, problems);
      }
    }
  }
}

// A call of its own for each: nothing else shares the threads with it.
void check_alone() {
  for (const Shape& sizes : kShapes) {
    for (const Method& method : kMethods) {
      for (const Element element : {Element::kFloat, Element::kBFloat16}) {
        const bool diagonal = method.operation == kProducts && element == Element::kBFloat16;
        check(method, {integer_problem(method, element, element, sizes, all(sizes, diagonal), {},
                                       method.eps == 0 ? 3 : 1)});
      }
    }
  }
}

// Around the blocks of elementwise work and the chunks that lengths are summed in.
void check_blocks() {
  const Layouts strided{kLayouts[5], kLayouts[5], kLayouts[3], kLayouts[5]};
  for (const int64_t size : {1023, 1024, 1025, 8191, 8192, 8193, 20481}) {
    for (const Layouts& layouts : {Layouts{}, strided}) {
      for (const Operation operation : {kLength, kAdam}) {
        const Method method = methods_of(operation)[operation == kAdam];
        check(method,
              {integer_problem(method, Element::kFloat, Element::kFloat, {size}, {true}, layouts),
               integer_problem(method, Element::kDouble, Element::kHalf, {size}, {true}, layouts)});
      }
    }
  }
}

void check_large() {
  const Layouts strided{kLayouts[5], kLayouts[1], kLayouts[1], kSharingLayouts[0]};
  for (const Operation operation : kOperations) {
    const Method method = methods_of(operation)[0];
    for (const LargeCase& large : kLargeCases) {
      const expect::Case what(large.what);
      const auto run = [&](Element element, Element grad, const Layouts& layouts) {
        check(method,
              {integer_problem(method, element, grad, large.sizes, large.diagonal, layouts)});
      };
      run(Element::kFloat, Element::kFloat, {});
      if (kSanitized) continue;
      run(Element::kDouble, Element::kHalf, strided);
      run(Element::kHalf, Element::kDouble, strided);
    }
    // Small tensors among large ones; strided elements in pieces on many threads.
    std::vector<Problem> together;
    for (const size_t i : {1u, 5u}) {
      const Element element = i == 5 ? Element::kBFloat16 : Element::kFloat;
      together.push_back(integer_problem(method, element, element, kLargeCases[i].sizes,
                                         kLargeCases[i].diagonal, strided));
      for (const Shape& sizes : kShapes) {
        together.push_back(
            integer_problem(method, element, element, sizes, all(sizes, false), strided));
      }
    }
    check(method, together);
    const OneThread here;
    check(method, together);
  }
}

// Thousands of small products at once, of sizes that no vector length divides: a BLAS that keeps
// data of a call in memory of its own (see blas.h) can fail here.
void check_many() {
  std::vector<Problem> problems;
  for (int i = 0; i < (kSanitized ? 40 : 400); ++i) {
    for (const Shape& sizes :
         std::vector<Shape>{{21, 10}, {10, 21}, {17, 33}, {33, 5}, {40, 9}, {3, 70}}) {
      problems.push_back(
          integer_problem(kMethods[0], Element::kFloat, Element::kFloat, sizes, {false, false}));
    }
  }
  check(kMethods[0], problems);
}

// Operands that bfloat16 holds, so that rounding changes nothing: those of one full factor.
void check_rounded_products() {
  const BFloat16Products here;
  may_round = true;
  for (const Method& method : kMethods) {
    std::vector<Problem> problems;
    for (const Shape& sizes :
         std::vector<Shape>{{128, 70}, {64, 200}, {63, 90}, {65, 3, 70}, {64, 1}, {700, 64}}) {
      for (size_t full = 0; full < sizes.size(); ++full) {
        std::vector<bool> diagonal = all(sizes, true);
        diagonal[full] = false;
        problems.push_back(
            integer_problem(method, Element::kFloat, Element::kFloat, sizes, diagonal));
        if (full > 0 || kSanitized) continue;
        check(method, {problems.back()});
        problems.push_back(
            integer_problem(method, Element::kDouble, Element::kFloat, sizes, diagonal));
      }
    }
    check(method, problems);
  }
  may_round = false;
}

// No elements: no length, and no direction that would need one.
void check_empty() {
  for (const Operation operation : kOperations) {
    const Method method = methods_of(operation)[0];
    std::vector<Problem> none;
    EXPECT(call(method, none).empty());
    for (const Shape& sizes : std::vector<Shape>{{0}, {0, 3}, {4, 0}, {4, 0, 3}, {0, 0}, {1, 0}}) {
      for (const Element element : kElements) {
        check(method,
              {integer_problem(method, element, element, sizes, all(sizes, sizes[0] == 0))});
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
  check_many();
  check_rounded_products();
  check_empty();
  return expect::finish();
}
