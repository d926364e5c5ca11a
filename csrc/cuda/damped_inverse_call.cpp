#include "cuda/damped_inverse_call.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>
#include <type_traits>

#include "check.h"
#include "cuda/large_inverse.h"

namespace tnt::cuda {
namespace {

std::vector<TensorShape> shapes_of(at::TensorList stats, at::IntArrayRef orders) {
  std::vector<TensorShape> shapes;
  shapes.reserve(orders.size());
  size_t next = 0;
  for (const int64_t order : orders) {
    shapes.push_back({{}, stats[next].scalar_type() == at::kDouble});
    for (int64_t i = 0; i < order; ++i, ++next) {
      shapes.back().modes.push_back({stats[next].size(0), stats[next].dim() == 1});
    }
  }
  return shapes;
}

void fill_in_addresses(at::TensorList out, at::TensorList stats, std::vector<ModeRow>& modes) {
  for (size_t i = 0; i < modes.size(); ++i) {
    modes[i].stat = stats[i].const_data_ptr();
    modes[i].out = out[i].mutable_data_ptr();
    modes[i].row = stats[i].stride(0);
    modes[i].column = stats[i].dim() == 2 ? stats[i].stride(1) : 0;
  }
}

// Tables in one buffer; add() returns the offset of each.
class Tables {
 public:
  template <typename Row>
  size_t add(const std::vector<Row>& rows) {
    static_assert(std::has_unique_object_representations_v<Row> && sizeof(Row) % 8 == 0);
    const size_t first = bytes_.size(), count = rows.size() * sizeof(Row);
    bytes_.resize(first + count);
    if (count > 0) std::memcpy(bytes_.data() + first, rows.data(), count);
    return first;
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

template <typename Row>
const Row* rows_at(const std::byte* tables, size_t first) {
  return reinterpret_cast<const Row*>(tables + first);
}

// Inverts wave after wave: large inverses wait only for the other modes of their tensors.
void invert_large(Device& device, const Call& call, const Plan& plan, at::TensorList out,
                  at::TensorList stats, const at::Tensor& scales, const at::Tensor& eps,
                  const at::Tensor& bad, const at::Tensor& info) {
  for (const Wave& wave : plan.waves) {
    std::vector<at::Tensor> inverses;
    inverses.reserve(wave.groups.size());
    for (const LargeGroup& group : wave.groups) {
      inverses.push_back(invert_group(group, plan, stats, scales, eps, bad));
    }
    // The info of tensors in later waves is not final yet.
    device.judge(call, static_cast<int64_t>(plan.tensors.size()));
    const at::Tensor good = info.eq(0);
    for (size_t g = 0; g < wave.groups.size(); ++g) {
      const std::vector<int32_t>& modes = wave.groups[g].modes;
      for (size_t i = 0; i < modes.size(); ++i) {
        const auto mode = static_cast<size_t>(modes[i]);
        const ModeRow& row = plan.modes[mode];
        const at::Tensor made = inverses[g].select(0, static_cast<int64_t>(i));
        const at::Tensor inverse = made.narrow(0, 0, row.d).narrow(1, 0, row.d);
        at::Tensor target = out[mode];
        at::where_out(target, good.select(0, row.tensor), inverse, target);
      }
    }
  }
}

}  // namespace

at::Tensor damped_inverse(Device& device, at::TensorList out, at::TensorList stats,
                          at::IntArrayRef orders, const at::Tensor& damping, bool relative) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Device where = stats.empty() ? damping.device() : stats.front().device();
  TORCH_CHECK_VALUE(damping.device().is_cpu() || damping.device() == where, "damping must be on ",
                    where, " or the CPU, got ", damping.device());
  const bool on_host = damping.device().is_cpu();
  check_scalar("damping", damping);
  const double number = on_host ? checked_number("damping", damping) : 0;
  check_factors(out, stats, orders, where);
  Plan plan = make_plan(shapes_of(stats, orders), device.limits());
  fill_in_addresses(out, stats, plan.modes);

  Tables tables;
  const size_t tensors = tables.add(plan.tensors), modes = tables.add(plan.modes);
  const size_t floats = tables.add(plan.float_rows), doubles = tables.add(plan.double_rows);
  const size_t copies = tables.add(plan.copies);
  const auto count = [](const auto& rows) { return static_cast<int64_t>(rows.size()); };
  const auto options = at::TensorOptions().device(where);
  const at::Tensor info = at::empty({count(plan.tensors)}, options.dtype(at::kInt));
  if (plan.tensors.empty()) return info;

  const at::Tensor eps_number = on_host ? at::Tensor() : damping.to(at::kDouble);
  const at::Tensor scales = at::empty({count(plan.modes)}, options.dtype(at::kDouble));
  const at::Tensor eps = at::empty({count(plan.tensors)}, options.dtype(at::kDouble));
  // Zero, because the first wave is judged before the second sets its flags.
  const at::Tensor bad = at::zeros({plan.slots}, options.dtype(at::kInt));
  const at::Tensor scratch = at::empty({plan.scratch_bytes}, options.dtype(at::kByte));
  const std::byte* resident = device.resident(tables.bytes());
  const Call call{rows_at<TensorRow>(resident, tensors),
                  rows_at<ModeRow>(resident, modes),
                  on_host ? nullptr : eps_number.const_data_ptr<double>(),
                  number,
                  relative,
                  scales.mutable_data_ptr<double>(),
                  eps.mutable_data_ptr<double>(),
                  bad.mutable_data_ptr<int32_t>(),
                  info.mutable_data_ptr<int32_t>(),
                  static_cast<std::byte*>(scratch.mutable_data_ptr())};
  device.rescale(call, count(plan.tensors));
  device.invert(call, rows_at<InverseRow>(resident, floats), count(plan.float_rows),
                plan.largest_float, /*is_double=*/false);
  device.invert(call, rows_at<InverseRow>(resident, doubles), count(plan.double_rows),
                plan.largest_double, /*is_double=*/true);
  invert_large(device, call, plan, out, stats, scales, eps, bad, info);
  if (plan.waves.empty()) device.judge(call, count(plan.tensors));
  device.commit(call, rows_at<CopyRow>(resident, copies), count(plan.copies));
  for (const at::Tensor& tensor : out) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  return info;
}

}  // namespace tnt::cuda
