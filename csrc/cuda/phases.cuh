// Kernels as lists of phases: the code between two barriers is a function of the thread alone.
//
// A kernel is a struct with one block's arguments and shared memory. Its member template
// phases(run) calls run(phase) for one phase after the other. On a device, run calls the phase for
// its own thread and then waits for the block. On a host (tests/native/host_launch.h) it calls the
// phase for every thread of the block in a random order: a result that depends on the order would
// be a race on a device, and sanitizers see every access. No thread-local value outlives a phase.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TNT_DEVICE __device__
#define TNT_HOST_DEVICE __host__ __device__
#define TNT_UNROLL _Pragma("unroll")
#else
#define TNT_DEVICE
#define TNT_HOST_DEVICE
#define TNT_UNROLL
#endif

namespace tnt::cuda {

// A thread and how many its block has.
struct Thread {
  int index, count;
};

#ifdef __CUDACC__

// The `run` argument of phases().
struct OnDevice {
  template <typename Phase>
  __device__ void operator()(const Phase& phase) const {
    phase(Thread{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)});
    __syncthreads();
  }
};

#endif

}  // namespace tnt::cuda
