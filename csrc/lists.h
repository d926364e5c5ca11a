// The functions of tnt_kernels/lists.py in C++. Their contracts stand there.
#pragma once

#include <pybind11/pybind11.h>

namespace tnt {

void define_lists(pybind11::module_ module);

}  // namespace tnt
