#include "cuda/factor_plan.h"

#include <algorithm>

namespace tnt::cuda {
namespace {

struct LargeMode {
  int32_t mode;
  int64_t d;
  bool is_double;
};

struct LargeTensor {
  int32_t tensor;
  std::vector<LargeMode> modes;
  int64_t bytes = 0, largest = 0;
};

class Planner {
 public:
  explicit Planner(const Limits& limits) : limits_(limits) {}

  Plan plan(const std::vector<TensorShape>& tensors) {
    for (const TensorShape& tensor : tensors) add(tensor);
    // The largest first: the last blocks to start should be short.
    for (auto* rows : {&plan_.float_rows, &plan_.double_rows}) {
      std::stable_sort(rows->begin(), rows->end(),
                       [this](const auto& a, const auto& b) { return size_of(a) > size_of(b); });
    }
    add_waves();
    return std::move(plan_);
  }

 private:
  // The size of the matrix in shared memory; 0 for a piece of a diagonal.
  int64_t size_of(const InverseRow& row) const {
    const ModeRow& mode = plan_.modes[static_cast<size_t>(row.mode)];
    return mode.diagonal ? 0 : mode.d;
  }

  void add(const TensorShape& shape) {
    const auto tensor = static_cast<int32_t>(plan_.tensors.size());
    plan_.tensors.push_back({static_cast<int32_t>(plan_.modes.size()),
                             static_cast<int32_t>(shape.modes.size()), shape.is_double, 0});
    LargeTensor large{tensor, {}};
    for (const ModeShape& mode : shape.modes) {
      const auto index = static_cast<int32_t>(plan_.modes.size());
      ModeRow row{nullptr, nullptr, 0, 0, plan_.scratch_bytes, mode.d, tensor, 0, 0, mode.diagonal};
      const bool in_block = mode.d <= (shape.is_double ? limits_.of_double : limits_.of_float);
      if (mode.diagonal || in_block) {
        add_small(index, mode, shape.is_double, row);
      } else {
        large.modes.push_back({index, mode.d, shape.is_double});
        large.bytes += mode.count() * shape.width();
        large.largest = std::max(large.largest, mode.d);
      }
      plan_.modes.push_back(row);
    }
    if (!large.modes.empty()) large_.push_back(std::move(large));
  }

  void add_small(int32_t index, const ModeShape& mode, bool is_double, ModeRow& row) {
    auto& rows = is_double ? plan_.double_rows : plan_.float_rows;
    int64_t& largest = is_double ? plan_.largest_double : plan_.largest_float;
    const int64_t count = mode.count(),
                  piece = mode.diagonal ? kPiece : std::max<int64_t>(count, 1);
    row.first_slot = static_cast<int32_t>(plan_.slots);
    for (int64_t first = 0; first < count; first += piece) {
      const auto slot = static_cast<int32_t>(plan_.slots++);
      rows.push_back({first, std::min(piece, count - first), index, slot});
      ++row.slots;
    }
    if (!mode.diagonal) largest = std::max(largest, mode.d);
    for (int64_t first = 0; first < count; first += kPiece) {
      plan_.copies.push_back({first, std::min(kPiece, count - first), index, 0});
    }
    const int64_t bytes = count * (is_double ? 8 : 4);
    plan_.scratch_bytes += (bytes + 15) / 16 * 16;
  }

  void add_waves() {
    // Sorted, so that matrices of similar size share a wave.
    std::stable_sort(large_.begin(), large_.end(),
                     [](const auto& a, const auto& b) { return a.largest > b.largest; });
    int64_t most = kWaitingBytes;
    for (const LargeTensor& tensor : large_) most = std::max(most, tensor.bytes);
    for (size_t first = 0, end = 0; first < large_.size(); first = end) {
      int64_t bytes = 0;
      Wave wave;
      std::vector<LargeMode> modes;
      for (end = first; end < large_.size() && bytes + large_[end].bytes <= most; ++end) {
        bytes += large_[end].bytes;
        wave.tensors.push_back(large_[end].tensor);
        modes.insert(modes.end(), large_[end].modes.begin(), large_[end].modes.end());
      }
      add_groups(std::move(modes), wave);
      plan_.waves.push_back(std::move(wave));
    }
  }

  void add_groups(std::vector<LargeMode> modes, Wave& wave) {
    std::stable_sort(modes.begin(), modes.end(), [](const LargeMode& a, const LargeMode& b) {
      return a.is_double != b.is_double ? b.is_double : a.d > b.d;
    });
    for (size_t first = 0, end = 0; first < modes.size(); first = end) {
      const LargeMode& largest = modes[first];
      const bool alone = largest.d > kLargestBatched;
      const int64_t padding = std::max(kPadding, largest.d / kPadding);
      LargeGroup group{largest.d, static_cast<int32_t>(plan_.slots), {}};
      for (end = first; end < modes.size(); ++end) {
        const LargeMode& mode = modes[end];
        if (end > first &&
            (alone || mode.is_double != largest.is_double || mode.d < largest.d - padding)) {
          break;
        }
        ModeRow& row = plan_.modes[static_cast<size_t>(mode.mode)];
        row.first_slot = static_cast<int32_t>(plan_.slots++);
        row.slots = 1;
        group.modes.push_back(mode.mode);
      }
      wave.groups.push_back(std::move(group));
    }
  }

  Limits limits_;
  Plan plan_;
  std::vector<LargeTensor> large_;
};

}  // namespace

Plan make_plan(const std::vector<TensorShape>& tensors, const Limits& limits) {
  return Planner(limits).plan(tensors);
}

}  // namespace tnt::cuda
