// The operators as csrc/cpu/register.cpp gives them to PyTorch.
#pragma once

#include <string>

namespace tnt {

// A line for each operator: its name and its types.
std::string signatures();

// Throws std::invalid_argument if TNT_BLAS names no BLAS.
void register_operators();

}  // namespace tnt
