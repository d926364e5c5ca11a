// How many threads the kernels find, whichever kind of threads they were built for.
#pragma once

#ifndef TNT_STD_THREADS
#include <ATen/Parallel.h>
#endif

#include <limits>

#include "cpu/blas.h"
#include "cpu/tasks.h"

// A sanitized build, on a BLAS of plain loops, takes many times as long: the longest cases are
// left to the other one.
#ifdef TNT_STD_THREADS
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Once, before anything else: three threads on any machine, so that every machine cuts the work at
// the same places.
inline void use_three_threads() {
  tnt::blas::choose_products("");
#ifndef TNT_STD_THREADS
  at::set_num_threads(3);
#else
  static_assert(TNT_STD_THREADS == 3);
#endif
}

// While it lives, all runs on the calling thread.
class OneThread {
 public:
#ifndef TNT_STD_THREADS
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(3); }
#else
  OneThread() { tnt::inside_task = true; }
  ~OneThread() { tnt::inside_task = false; }
#endif
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
};

// Whether the calling thread computes with subnormal numbers: the kernels must leave that as it
// was.
inline bool keeps_subnormals() {
  volatile float smallest_normal = std::numeric_limits<float>::min();
  return smallest_normal / 2 > 0;
}
