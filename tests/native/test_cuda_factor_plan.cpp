// The plan of damped_inverse on a GPU: the tables have every mode once, and the groups of large
// modes stay within the limits of waiting memory and of padding.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/factor_plan.h"
#include "expect.h"

namespace {

using tnt::cuda::LargeGroup;
using tnt::cuda::Limits;
using tnt::cuda::ModeRow;
using tnt::cuda::Plan;
using tnt::cuda::TensorShape;
using tnt::cuda::Wave;

constexpr Limits kLimits{128, 96};

int64_t width_of(const TensorShape& tensor) { return tensor.is_double ? 8 : 4; }

// Counts what covers each of `count` places.
class Cover {
 public:
  explicit Cover(int64_t count) : seen_(static_cast<size_t>(count), 0) {}
  void add(int64_t first, int64_t count = 1) {
    for (int64_t i = first; i < first + count; ++i) ++seen_.at(static_cast<size_t>(i));
  }
  bool once() const {
    return std::all_of(seen_.begin(), seen_.end(), [](int times) { return times == 1; });
  }

 private:
  std::vector<int> seen_;
};

// Each mode has flags and scratch memory of its own.
void check_tables(const std::vector<TensorShape>& tensors, const Plan& plan) {
  Cover slots(plan.slots), scratch(plan.scratch_bytes / 4);
  std::vector<Cover> entries, copied;
  size_t next = 0;
  EXPECT(plan.tensors.size() == tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    EXPECT(plan.tensors[t].first_mode == static_cast<int32_t>(next));
    EXPECT(plan.tensors[t].order == static_cast<int32_t>(tensors[t].modes.size()));
    EXPECT(plan.tensors[t].is_double == tensors[t].is_double);
    for (const auto& shape : tensors[t].modes) {
      const ModeRow& row = plan.modes[next++];
      EXPECT(row.d == shape.d && row.diagonal == shape.diagonal);
      EXPECT(row.tensor == static_cast<int32_t>(t));
      slots.add(row.first_slot, row.slots);
      const int64_t limit = tensors[t].is_double ? kLimits.of_double : kLimits.of_float;
      const bool small = shape.diagonal || shape.d <= limit;
      entries.emplace_back(small ? shape.count() : 0);
      copied.emplace_back(small ? shape.count() : 0);
      const int64_t bytes = small ? shape.count() * width_of(tensors[t]) : 0;
      EXPECT(row.scratch % 16 == 0 && row.scratch + bytes <= plan.scratch_bytes);
      scratch.add(row.scratch / 4, (bytes + 15) / 16 * 4);
    }
  }
  EXPECT(plan.modes.size() == next);
  EXPECT(slots.once() && scratch.once());
  for (const bool is_double : {false, true}) {
    const auto& rows = is_double ? plan.double_rows : plan.float_rows;
    int64_t largest = 0;
    for (const auto& row : rows) {
      const ModeRow& mode = plan.modes[static_cast<size_t>(row.mode)];
      EXPECT(plan.tensors[static_cast<size_t>(mode.tensor)].is_double == is_double);
      EXPECT(row.slot >= mode.first_slot && row.slot < mode.first_slot + mode.slots);
      EXPECT(mode.diagonal ? row.count <= tnt::cuda::kPiece : row.count == mode.d * mode.d);
      entries[static_cast<size_t>(row.mode)].add(row.first, row.count);
      if (!mode.diagonal) largest = std::max(largest, mode.d);
    }
    EXPECT(largest == (is_double ? plan.largest_double : plan.largest_float));
  }
  for (const auto& row : plan.copies) {
    EXPECT(row.count <= tnt::cuda::kPiece);
    copied[static_cast<size_t>(row.mode)].add(row.first, row.count);
  }
  for (size_t i = 0; i < next; ++i) EXPECT(entries[i].once() && copied[i].once());
}

void check_group(const Plan& plan, const LargeGroup& group) {
  const int64_t least =
      group.size - std::max(tnt::cuda::kPadding, group.size / tnt::cuda::kPadding);
  EXPECT(!group.modes.empty());
  EXPECT(group.modes.size() == 1 || group.size <= tnt::cuda::kLargestBatched);
  const auto is_double = [&](int32_t mode) {
    const int32_t tensor = plan.modes[static_cast<size_t>(mode)].tensor;
    return plan.tensors[static_cast<size_t>(tensor)].is_double;
  };
  int64_t largest = 0;
  for (size_t i = 0; i < group.modes.size(); ++i) {
    const ModeRow& row = plan.modes[static_cast<size_t>(group.modes[i])];
    EXPECT(row.first_slot == group.first_slot + static_cast<int32_t>(i) && row.slots == 1);
    EXPECT(row.d >= least && is_double(group.modes[i]) == is_double(group.modes[0]));
    largest = std::max(largest, row.d);
  }
  EXPECT(largest == group.size);
}

// All large modes of a tensor in the same wave, and no more in one than may wait.
void check_waves(const std::vector<TensorShape>& tensors, const Plan& plan) {
  Cover modes(static_cast<int64_t>(plan.modes.size()));
  for (const auto* rows : {&plan.float_rows, &plan.double_rows}) {
    for (const auto& row : *rows) {
      if (row.first == 0) modes.add(row.mode);
    }
  }
  std::vector<int64_t> bytes_of(tensors.size(), 0);
  int64_t may_wait = tnt::cuda::kWaitingBytes;
  for (size_t i = 0; i < plan.modes.size(); ++i) {
    const ModeRow& row = plan.modes[i];
    if (row.d == 0) modes.add(static_cast<int64_t>(i));  // nothing to do
    const TensorShape& tensor = tensors[static_cast<size_t>(row.tensor)];
    const bool large =
        !row.diagonal && row.d > (tensor.is_double ? kLimits.of_double : kLimits.of_float);
    int64_t& bytes = bytes_of[static_cast<size_t>(row.tensor)];
    if (large) bytes += row.d * row.d * width_of(tensor);
    may_wait = std::max(may_wait, bytes);
  }
  for (const Wave& wave : plan.waves) {
    int64_t waiting = 0;
    for (const int32_t tensor : wave.tensors) waiting += bytes_of[static_cast<size_t>(tensor)];
    EXPECT(waiting <= may_wait);
    for (const LargeGroup& group : wave.groups) {
      check_group(plan, group);
      for (const int32_t mode : group.modes) {
        modes.add(mode);
        const int32_t tensor = plan.modes[static_cast<size_t>(mode)].tensor;
        EXPECT(std::count(wave.tensors.begin(), wave.tensors.end(), tensor) == 1);
      }
    }
  }
  EXPECT(modes.once());
}

Plan check(const char* name, const std::vector<TensorShape>& tensors) {
  const expect::Case current(name);
  Plan plan = tnt::cuda::make_plan(tensors, kLimits);
  check_tables(tensors, plan);
  check_waves(tensors, plan);
  return plan;
}

size_t groups_of(const Plan& plan) {
  size_t count = 0;
  for (const Wave& wave : plan.waves) count += wave.groups.size();
  return count;
}

TensorShape full(std::vector<int64_t> sizes, bool is_double = false) {
  TensorShape tensor{{}, is_double};
  for (const int64_t d : sizes) tensor.modes.push_back({d, false});
  return tensor;
}

void check_plans() {
  EXPECT(check("nothing", {}).slots == 0);
  check("small", {full({1}), full({128, 3}), full({96, 0, 5}, true), full({0})});
  check("diagonal", {{{{9000, true}, {3, false}}, false}, {{{50'257, true}, {129, false}}, true}});
  // 97 fits a block's memory as float, not as double.
  const Plan both =
      check("both types", {full({97}), full({97}, true), full({130}), full({130}, true)});
  EXPECT(both.float_rows.size() == 1 && both.double_rows.empty());
  EXPECT(groups_of(both) == 3);
  // The first block to run is the one that takes longest.
  const Plan order = check("order", {full({9, 64}), full({128, 3}), {{{300, true}}, false}});
  for (size_t i = 1; i < order.float_rows.size(); ++i) {
    const auto size = [&](size_t row) {
      const ModeRow& mode = order.modes[static_cast<size_t>(order.float_rows[row].mode)];
      return mode.diagonal ? 0 : mode.d;
    };
    EXPECT(size(i - 1) >= size(i));
  }
  // Padding: 16 below, not 17; a 16th of what is larger.
  EXPECT(groups_of(check("padding", {full({160}), full({145}), full({144}), full({143})})) == 2);
  EXPECT(groups_of(check("a 16th", {full({1024}), full({960}), full({959})})) == 2);
  // Too large for a batch, even among its like.
  EXPECT(groups_of(check("alone", std::vector<TensorShape>(3, full({1025})))) == 3);
  // gpt2: as many waves as it takes for a layer's 3072 x 768 to be the most that waits.
  std::vector<TensorShape> gpt2;
  for (int layer = 0; layer < 12; ++layer) {
    for (const auto& sizes :
         {std::vector<int64_t>{2304, 768}, {768, 768}, {3072, 768}, {768, 3072}}) {
      gpt2.push_back(full(sizes));
      gpt2.push_back(full({sizes[0]}));
    }
  }
  const Plan plan = check("gpt2", gpt2);
  EXPECT(plan.waves.size() > 1);
  // Many of one size: batches of what may wait.
  const Plan many = check("many", std::vector<TensorShape>(100, full({512, 64})));
  EXPECT(many.waves.size() == 7 && groups_of(many) == 7);
}

}  // namespace

int main() {
  check_plans();
  return expect::finish();
}
