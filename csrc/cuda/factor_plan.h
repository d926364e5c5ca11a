// Which block, piece or group makes which factor: the tables of damped_inverse.cuh, planned from
// shapes alone. Plain C++: no device, no tensors.
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

// The largest matrices that a block has shared memory for; at most kLargestInBlock.
struct Limits {
  int64_t of_float, of_double;
};

// Entries of a diagonal, or of a factor to copy, that one block takes.
constexpr int64_t kPiece = 4096;

// Large matrices up to this size share a batch with others of about their size. From 2048 on a
// batch gains nothing over one after the other, up to 1024 it does (PyTorch's _foreach_mm proposal,
// H100).
constexpr int64_t kLargestBatched = 1024;

// In a batch, matrices are padded with the identity: by a 16th, or to the next 16.
constexpr int64_t kPadding = 16;

// What may wait in memory for the other modes of its tensor: 16 MB, or the large modes of one
// tensor if they take more. While a group is inverted, three times its own size comes on top.
constexpr int64_t kWaitingBytes = int64_t{1} << 24;

// Large matrices of one type, to be inverted as one batch of (size, size).
struct LargeGroup {
  int64_t size;
  int32_t first_slot;  // their flags, in the order of `modes`
  std::vector<int32_t> modes;
};

// The large modes of some tensors, all of them: when its groups are done, they can be committed.
struct Wave {
  std::vector<int32_t> tensors;
  std::vector<LargeGroup> groups;
};

struct Plan {
  std::vector<TensorRow> tensors;
  std::vector<ModeRow> modes;  // addresses and strides are the caller's to fill in
  std::vector<InverseRow> float_rows, double_rows;
  std::vector<CopyRow> copies;
  std::vector<Wave> waves;
  int64_t largest_float = 0, largest_double = 0;  // matrices in float_rows and double_rows
  int64_t slots = 0;
  int64_t scratch_bytes = 0;
};

Plan make_plan(const std::vector<TensorShape>& tensors, const Limits& limits);

}  // namespace tnt::cuda
