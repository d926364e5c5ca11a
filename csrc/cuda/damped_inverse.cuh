// damped_inverse on a GPU: the tables its kernels read, and their launches. Nothing here waits for
// the device, and nothing here knows PyTorch.
//
// A call is a fixed number of launches, whatever the number of tensors:
//   rescale   what turns each mode's statistic into U_i (equation 13), and the damping
//   invert    (U_i + eps I)^-1 to scratch memory, and whether it is good: matrices of unlike sizes,
//             one thread block each, and diagonal modes in pieces (one launch for a type)
//   judge     info[t]: 0, or i + 1 for the first bad mode i of tensor t
//   commit    from scratch memory to `out`, where info is 0
// Matrices that are too large for one block's shared memory are inverted between invert and judge
// by large_inverse.h.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // *cudaStream_t

namespace tnt::cuda {

// A Cholesky pivot below so many roundings of its diagonal entry counts as zero: its inverse would
// be noise. As on the CPU (cpu/damped_inverse.h).
constexpr int kPivotRoundings = 16;

// Threads of every block.
constexpr int kThreads = 256;

// Matrices larger than this have no block of their own.
constexpr int64_t kLargestInBlock = 128;

// The tables. All of their bytes count when the host compares them: no padding.

struct TensorRow {
  int32_t first_mode, order;
  int32_t is_double;
  int32_t unused;
};

struct ModeRow {
  const void*
      stat;   // entry (r, c) of a matrix at r * row + c * column, entry r of a diagonal at r * row
  void* out;  // contiguous
  int64_t row, column;
  int64_t scratch;  // where the factor waits: bytes from the start of the scratch memory
  int64_t d;
  int32_t tensor;
  int32_t first_slot, slots;  // its flags in `bad`
  int32_t diagonal;
};

// One block's share of invert: a matrix, or a piece of a diagonal.
struct InverseRow {
  int64_t first, count;  // of a diagonal's entries
  int32_t mode;
  int32_t slot;
};

// One block's share of commit.
struct CopyRow {
  int64_t first, count;  // entries
  int32_t mode;
  int32_t unused;
};

// What all kernels of a call are given. Pointers are to device memory.
struct Call {
  const TensorRow* tensors;
  const ModeRow* modes;
  const double* damping_on_device;  // instead of `damping`, if not null
  double damping;
  bool relative;
  double* scales;      // for each mode: U_i = scale S_i
  double* eps;         // for each tensor
  int32_t* bad;        // for each slot: not 0 where something failed
  int32_t* info;       // for each tensor
  std::byte* scratch;  // aligned to 16 bytes
};

// Shared memory, in bytes, of a block that inverts an (n, n) matrix.
template <typename T>
int64_t shared_bytes(int64_t n);

// The launches; each returns its cudaError_t. `largest` is the size of the largest matrix among
// `rows`, 0 for none.
int launch_rescale(const Call& call, int64_t tensors, CUstream_st* stream);
template <typename T>
int launch_invert(const Call& call, const InverseRow* rows, int64_t count, int64_t largest,
                  CUstream_st* stream);
int launch_judge(const Call& call, int64_t tensors, CUstream_st* stream);
int launch_commit(const Call& call, const CopyRow* rows, int64_t count, CUstream_st* stream);

}  // namespace tnt::cuda
