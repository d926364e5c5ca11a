// Updates of parameters along given directions.
#pragma once

#include <vector>

#include "cpu/views.h"

namespace tnt {

// W, its direction P, and the rates of both. P is double for a double W, else float.
struct ScaledStep {
  TensorView param;
  TensorView direction;
  double rate, decay;
};

// W <- W - (rate P + decay W) for every parameter, rounded once.
void scaled_step(const std::vector<ScaledStep>& steps);

}  // namespace tnt
