// Assigns factors to blocks, pieces and groups: the tables of damped_inverse.cuh, from shapes
// alone. Plain C++, without device or tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/damped_inverse.cuh"

namespace tnt::cuda {

// A full mode of size d, or a diagonal one.
struct ModeShape {
  int64_t d;
  bool diagonal;

  int64_t count() const { return diagonal ? d : d * d; }
};

struct TensorShape {
  std::vector<ModeShape> modes;
  bool is_double;

  int64_t width() const { return is_double ? 8 : 4; }
};

// The largest matrices that fit a block's shared memory, at most kLargestInBlock.
struct Limits {
  int64_t of_float, of_double;
};

// Entries of a diagonal, or of a factor to copy, for one block.
constexpr int64_t kPiece = 4096;

// Large matrices up to this size share a batch with matrices of about their size. On an H100,
// batches are faster than single matrices up to 1024, and not from 2048 on (PyTorch's _foreach_mm
// proposal).
constexpr int64_t kLargestBatched = 1024;

// Matrices of a batch are padded with the identity by at most a 16th of the largest, or by 16.
constexpr int64_t kPadding = 16;

// Bytes of large inverses that may wait for the other modes of their tensors: 16 MB, or one
// tensor's if they are larger. The inversion of a group takes another three times the group's size.
constexpr int64_t kWaitingBytes = int64_t{1} << 24;

// Large matrices of one type, inverted as one batch of (size, size).
struct LargeGroup {
  int64_t size;
  int32_t first_slot;  // their flags, in the order of `modes`
  std::vector<int32_t> modes;
};

// All large modes of some tensors, which can be committed when the groups are done.
struct Wave {
  std::vector<int32_t> tensors;
  std::vector<LargeGroup> groups;
};

struct Plan {
  std::vector<TensorRow> tensors;
  std::vector<ModeRow> modes;  // the caller fills in addresses and strides
  std::vector<InverseRow> float_rows, double_rows;
  std::vector<CopyRow> copies;
  std::vector<Wave> waves;
  int64_t largest_float = 0, largest_double = 0;  // matrices in float_rows and double_rows
  int64_t slots = 0;
  int64_t scratch_bytes = 0;
};

Plan make_plan(const std::vector<TensorShape>& tensors, const Limits& limits);

}  // namespace tnt::cuda
