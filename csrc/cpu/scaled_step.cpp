#include "cpu/momentum.h"
#include "cpu/operators.h"

namespace tnt {

void scaled_step(const std::vector<ScaledStep>& steps) {
  std::vector<double> flops;
  flops.reserve(steps.size());
  for (const ScaledStep& step : steps) {
    flops.push_back(16 * static_cast<double>(step.param.count()));
  }
  const auto run = [&](size_t i, Scratch) {
    const ScaledStep& step = steps[i];
    with_state(step.param.element, [&](auto zero) {
      using T = decltype(zero);
      subtract(step.param, step.direction, static_cast<T>(step.rate), static_cast<T>(step.decay));
    });
  };
  run_in_order(order_by_cost(flops), [](size_t) { return 0; }, run);
}

}  // namespace tnt
