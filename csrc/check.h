// Argument checks that say which argument, what it must be, and what came.
//
// The public functions in tnt_kernels/ops.py know arguments as stats[t][i] and name them so; here,
// for whoever calls torch.ops.tnt_kernels directly, lists are flat.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace tnt {

// The dtype of statistics, factors and momenta that belong to a tensor.
inline at::ScalarType state_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Names are put together only where they are wanted: in an error.
inline std::string entry(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

inline void check_length(const char* name, size_t got, size_t wanted) {
  TORCH_CHECK_VALUE(got == wanted, name, " must have ", wanted, " entries, got ", got);
}

inline double checked_number(const char* name, const at::Tensor& value,
                             double high = std::numeric_limits<double>::max()) {
  TORCH_CHECK_VALUE(value.dim() == 0 && value.is_floating_point(), name,
                    " must be a 0-dim floating-point tensor, got ", value.sizes(), ", ",
                    value.scalar_type());
  const double number = value.item<double>();
  TORCH_CHECK_VALUE(number >= 0 && number <= high, name, " must be in [0, ", high, "], got ",
                    number);
  return number;
}

inline void check_dense(const char* list, size_t t, const at::Tensor& tensor,
                        at::Device device = at::kCPU) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.device() == device, entry(list, t),
                    " must be a dense tensor on ", device.is_cpu() ? "the CPU" : device.str(),
                    ", got ", tensor.layout(), " on ", tensor.device());
}

// A tensor of any shape but 0-dim and any dtype that is served.
inline void check_tensor(const char* list, size_t t, const at::Tensor& tensor) {
  check_dense(list, t, tensor);
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      entry(list, t), " must be float32, float64, bfloat16 or float16, got ", dtype);
  TORCH_CHECK_VALUE(tensor.dim() >= 1, entry(list, t), " must have at least one mode, got none");
}

// Memory that a kernel writes: one place for each element. (Views that stand for something else
// than what lies in memory, negated and zero ones, PyTorch's dispatcher resolves or refuses
// itself.)
inline void check_writable(const char* list, size_t t, const at::Tensor& tensor) {
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    TORCH_CHECK_VALUE(tensor.stride(i) != 0 || tensor.size(i) <= 1, entry(list, t),
                      " must have memory of its own for each element, got strides ",
                      tensor.strides());
  }
}

inline void check_contiguous(const char* list, size_t t, const at::Tensor& tensor) {
  check_writable(list, t, tensor);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), entry(list, t), " must be contiguous, got strides ",
                    tensor.strides());
}

// A statistic or factor of a mode of size d of `tensor`: (d, d), or (d,) for a diagonal mode.
inline void check_mode(const char* list, size_t t, const at::Tensor& mode, int64_t d,
                       const at::Tensor& tensor, bool written) {
  check_dense(list, t, mode);
  const bool full = mode.dim() == 2 && mode.size(0) == d && mode.size(1) == d;
  TORCH_CHECK_VALUE(full || (mode.dim() == 1 && mode.size(0) == d), entry(list, t), " must be (", d,
                    ", ", d, ") or (", d, ",), got ", mode.sizes());
  TORCH_CHECK_VALUE(mode.scalar_type() == state_dtype(tensor), entry(list, t), " must be ",
                    state_dtype(tensor), " for a ", tensor.scalar_type(), " tensor, got ",
                    mode.scalar_type());
  if (written) check_contiguous(list, t, mode);
}

// A statistic and where its factor goes, of a tensor whose first statistic is `first`.
inline void check_factor_pair(size_t t, const at::Tensor& stat, const at::Tensor& out,
                              const at::Tensor& first, at::Device device) {
  check_dense("stats", t, stat, device);
  check_dense("out", t, out, device);
  const auto dtype = stat.scalar_type();
  TORCH_CHECK_VALUE((dtype == at::kFloat || dtype == at::kDouble) && dtype == first.scalar_type(),
                    entry("stats", t),
                    " must be float32 or float64, one dtype for each tensor, got ", dtype);
  TORCH_CHECK_VALUE(stat.dim() == 1 || (stat.dim() == 2 && stat.size(0) == stat.size(1)),
                    entry("stats", t), " must be (d, d) or (d,), got ", stat.sizes());
  TORCH_CHECK_VALUE(out.sizes() == stat.sizes() && out.scalar_type() == dtype, entry("out", t),
                    " must be like ", entry("stats", t), ", ", stat.sizes(), " ", dtype, ", got ",
                    out.sizes(), " ", out.scalar_type());
  check_contiguous("out", t, out);
}

// A parameter, already a good tensor, with its momentum and gradient.
inline void check_step(size_t t, const at::Tensor& param, const at::Tensor& momentum,
                       const at::Tensor& grad) {
  check_tensor("momenta", t, momentum);
  check_tensor("grads", t, grad);
  TORCH_CHECK_VALUE(momentum.sizes() == param.sizes(), entry("momenta", t), " must be ",
                    param.sizes(), ", got ", momentum.sizes());
  TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), entry("grads", t), " must be ", param.sizes(),
                    ", got ", grad.sizes());
  TORCH_CHECK_VALUE(momentum.scalar_type() == state_dtype(param), entry("momenta", t), " must be ",
                    state_dtype(param), ", got ", momentum.scalar_type());
  check_writable("params", t, param);
  check_writable("momenta", t, momentum);
}

// Like another tensor in shape and dtype.
inline void check_like(const char* list, size_t t, const at::Tensor& tensor, const char* other_list,
                       const at::Tensor& other) {
  check_dense(list, t, tensor);
  TORCH_CHECK_VALUE(tensor.sizes() == other.sizes() && tensor.scalar_type() == other.scalar_type(),
                    entry(list, t), " must be like ", entry(other_list, t), ", ", other.sizes(),
                    " ", other.scalar_type(), ", got ", tensor.sizes(), " ", tensor.scalar_type());
}

// A momentum with its gradient.
inline void check_moment(size_t t, const at::Tensor& momentum, const at::Tensor& grad) {
  check_tensor("momenta", t, momentum);
  check_tensor("grads", t, grad);
  TORCH_CHECK_VALUE(momentum.scalar_type() == state_dtype(momentum), entry("momenta", t),
                    " must be float32 or float64, got ", momentum.scalar_type());
  TORCH_CHECK_VALUE(grad.sizes() == momentum.sizes(), entry("grads", t), " must be ",
                    momentum.sizes(), ", got ", grad.sizes());
  check_writable("momenta", t, momentum);
}

// Numbers of updates, two for each momentum, this one included.
inline void check_counts(const at::Tensor& counts, size_t momenta) {
  TORCH_CHECK_VALUE(counts.device().is_cpu() && counts.layout() == at::kStrided &&
                        counts.scalar_type() == at::kDouble && counts.dim() == 2 &&
                        counts.size(0) == static_cast<int64_t>(momenta) && counts.size(1) == 2,
                    "counts must be (", momenta, ", 2) float64 on the CPU, got ", counts.sizes(),
                    ", ", counts.scalar_type(), " on ", counts.device());
}

// Finds memory that a call would write and also use as something else. Views with gaps are left
// out: two that interleave share no element.
class Overlaps {
 public:
  void add_written(const char* list, at::TensorList tensors) { add(list, tensors, true); }
  void add_read(const char* list, at::TensorList tensors) { add(list, tensors, false); }

  void check() {
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return a.first < b.first; });
    const Range* reach = nullptr;          // of all before, the one that reaches farthest
    const Range* written_reach = nullptr;  // of those that are written
    for (const Range& range : ranges_) {
      const Range* other = range.written ? reach : written_reach;
      TORCH_CHECK_VALUE(other == nullptr || other->last <= range.first,
                        entry(range.list, range.index), " must not share memory with ",
                        entry(other->list, other->index), ": one of them is written");
      if (reach == nullptr || range.last > reach->last) reach = &range;
      if (range.written && (written_reach == nullptr || range.last > written_reach->last)) {
        written_reach = &range;
      }
    }
  }

 private:
  struct Range {
    const char *first, *last;
    const char* list;
    size_t index;
    bool written;
  };

  void add(const char* list, at::TensorList tensors, bool written) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      const at::Tensor& tensor = tensors[t];
      if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) continue;
      const auto* first = static_cast<const char*>(tensor.const_data_ptr());
      ranges_.push_back({first, first + tensor.nbytes(), list, t, written});
    }
  }

  std::vector<Range> ranges_;
};

// Statistics and where their factors go, `orders` of them for each tensor.
inline void check_factors(at::TensorList out, at::TensorList stats, at::IntArrayRef orders,
                          at::Device device) {
  int64_t count = 0;
  for (const int64_t order : orders) {
    TORCH_CHECK_VALUE(order >= 1, "orders must be at least 1, got ", order);
    count += order;
  }
  check_length("stats", stats.size(), static_cast<size_t>(count));
  check_length("out", out.size(), stats.size());
  size_t next = 0;
  for (const int64_t order : orders) {
    const at::Tensor& first = stats[next];
    for (int64_t i = 0; i < order; ++i, ++next) {
      check_factor_pair(next, stats[next], out[next], first, device);
    }
  }
  Overlaps overlaps;
  overlaps.add_written("out", out);
  overlaps.add_read("stats", stats);
  overlaps.check();
}

}  // namespace tnt
