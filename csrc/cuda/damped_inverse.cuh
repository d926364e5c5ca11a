// damped_inverse on a GPU: tables and launches. Nothing here waits for the device, or uses PyTorch.
//
// A call makes the same number of launches for any number of tensors:
//   rescale   computes each mode's factor from S_i to U_i (equation 13), and the damping
//   invert    writes (U_i + eps I)^-1 to the workspace, and whether it is good: one block for each
//             matrix, of any sizes, or piece of a diagonal mode (one launch for each type)
//   judge     info[t]: 0, or i + 1 for the first bad mode i of tensor t
//   commit    copies from the workspace to `out` if info is 0
// Between invert and judge, large_inverse.h inverts the matrices that are too large for one block.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // *cudaStream_t

namespace tnt::cuda {

// A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
constexpr int kPivotRoundings = 16;

// Threads in every block.
constexpr int kThreads = 256;

// The largest matrix that one block inverts.
constexpr int64_t kLargestInBlock = 128;

// The tables. They have no padding, because the host compares their bytes.

struct TensorRow {
  int32_t first_mode, order;
  int32_t is_double;
  int32_t unused;
};

struct ModeRow {
  const void* stat;  // entry (r, c) at r * row + c * column, entry r of a diagonal at r * row
  void* out;         // contiguous
  int64_t row, column;
  int64_t scratch;  // the factor's place in the workspace, bytes
  int64_t d;
  int32_t tensor;
  int32_t first_slot, slots;  // its flags in `bad`
  int32_t diagonal;
};

// One block of invert: a matrix, or a piece of a diagonal.
struct InverseRow {
  int64_t first, count;  // entries of a diagonal
  int32_t mode;
  int32_t slot;
};

// One block of commit.
struct CopyRow {
  int64_t first, count;  // entries
  int32_t mode;
  int32_t unused;
};

// The arguments of all kernels of a call. Pointers are to device memory.
struct Call {
  const TensorRow* tensors;
  const ModeRow* modes;
  const double* damping_on_device;  // replaces `damping` if not null
  double damping;
  bool relative;
  double* scales;      // for each mode: U_i = scale S_i
  double* eps;         // for each tensor
  int32_t* bad;        // for each slot: not 0 on failure
  int32_t* info;       // for each tensor
  std::byte* scratch;  // aligned to 16 bytes
};

// Bytes of shared memory of a block that inverts an (n, n) matrix.
template <typename T>
int64_t shared_bytes(int64_t n);

// The launches return their cudaError_t. `largest`: the size of the largest matrix in `rows`, or 0.
int launch_rescale(const Call& call, int64_t tensors, CUstream_st* stream);
template <typename T>
int launch_invert(const Call& call, const InverseRow* rows, int64_t count, int64_t largest,
                  CUstream_st* stream);
int launch_judge(const Call& call, int64_t tensors, CUstream_st* stream);
int launch_commit(const Call& call, const CopyRow* rows, int64_t count, CUstream_st* stream);

}  // namespace tnt::cuda
