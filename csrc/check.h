// Argument checks whose errors name the argument, the rule and the value.
//
// Lists are flat here, for direct calls of torch.ops.tnt_kernels; tnt_kernels/ops.py checks and
// names nested lists, stats[t][i].
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

namespace tnt {

// The dtype of a tensor's statistics, factors and momenta.
inline at::ScalarType state_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Only errors build names.
inline std::string entry(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

inline void check_length(const char* name, size_t got, size_t wanted) {
  TORCH_CHECK_VALUE(got == wanted, name, " must have ", wanted, " entries, got ", got);
}

inline void check_scalar(const char* name, const at::Tensor& value) {
  TORCH_CHECK_VALUE(value.dim() == 0 && value.is_floating_point(), name,
                    " must be a 0-dim floating-point tensor, got ", value.sizes(), ", ",
                    value.scalar_type());
}

inline double checked_number(const char* name, const at::Tensor& value,
                             double high = std::numeric_limits<double>::max()) {
  check_scalar(name, value);
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

// A tensor of at least one mode and a supported dtype.
inline void check_tensor(const char* list, size_t t, const at::Tensor& tensor) {
  check_dense(list, t, tensor);
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      entry(list, t), " must be float32, float64, bfloat16 or float16, got ", dtype);
  TORCH_CHECK_VALUE(tensor.dim() >= 1, entry(list, t), " must have at least one mode, got none");
}

// Memory that a kernel writes: no two elements may share an address. (PyTorch's dispatcher resolves
// or refuses negated and zero views.)
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

// Like another tensor in shape and dtype.
inline void check_like(const char* list, size_t t, const at::Tensor& tensor, const char* other_list,
                       const at::Tensor& other, at::Device device = at::kCPU) {
  check_dense(list, t, tensor, device);
  TORCH_CHECK_VALUE(tensor.sizes() == other.sizes() && tensor.scalar_type() == other.scalar_type(),
                    entry(list, t), " must be like ", entry(other_list, t), ", ", other.sizes(),
                    " ", other.scalar_type(), ", got ", tensor.sizes(), " ", tensor.scalar_type());
}

// A statistic and its factor, of a tensor whose first statistic is `first`.
inline void check_factor_pair(size_t t, const at::Tensor& stat, const at::Tensor& out,
                              const at::Tensor& first, at::Device device) {
  check_dense("stats", t, stat, device);
  const auto dtype = stat.scalar_type();
  TORCH_CHECK_VALUE((dtype == at::kFloat || dtype == at::kDouble) && dtype == first.scalar_type(),
                    entry("stats", t),
                    " must be float32 or float64, one dtype for each tensor, got ", dtype);
  TORCH_CHECK_VALUE(stat.dim() == 1 || (stat.dim() == 2 && stat.size(0) == stat.size(1)),
                    entry("stats", t), " must be (d, d) or (d,), got ", stat.sizes());
  check_like("out", t, out, "stats", stat, device);
  check_contiguous("out", t, out);
}

// The momentum and the gradient of a tensor, a parameter or the momentum itself.
inline void check_momentum(size_t t, const at::Tensor& momentum, const at::Tensor& grad,
                           const at::Tensor& tensor) {
  check_tensor("momenta", t, momentum);
  check_tensor("grads", t, grad);
  TORCH_CHECK_VALUE(momentum.sizes() == tensor.sizes(), entry("momenta", t), " must be ",
                    tensor.sizes(), ", got ", momentum.sizes());
  TORCH_CHECK_VALUE(grad.sizes() == tensor.sizes(), entry("grads", t), " must be ", tensor.sizes(),
                    ", got ", grad.sizes());
  TORCH_CHECK_VALUE(momentum.scalar_type() == state_dtype(tensor), entry("momenta", t), " must be ",
                    state_dtype(tensor), ", got ", momentum.scalar_type());
  check_writable("momenta", t, momentum);
}

// Two numbers of updates for each momentum.
inline void check_counts(const at::Tensor& counts, size_t momenta) {
  TORCH_CHECK_VALUE(counts.device().is_cpu() && counts.layout() == at::kStrided &&
                        counts.scalar_type() == at::kDouble && counts.dim() == 2 &&
                        counts.size(0) == static_cast<int64_t>(momenta) && counts.size(1) == 2,
                    "counts must be (", momenta, ", 2) float64 on the CPU, got ", counts.sizes(),
                    ", ", counts.scalar_type(), " on ", counts.device());
}

struct NamedList {
  const char* name;
  at::TensorList tensors;
};

// Refuses written memory that appears twice in a call. Views with gaps, which may interleave, pass.
inline void check_overlaps(std::initializer_list<NamedList> written,
                           std::initializer_list<NamedList> read) {
  struct Range {
    const char *first, *last;
    const char* list;
    size_t index;
    bool written;
  };
  std::vector<Range> ranges;
  for (const bool is_written : {true, false}) {
    for (const NamedList& list : is_written ? written : read) {
      for (size_t t = 0; t < list.tensors.size(); ++t) {
        const at::Tensor& tensor = list.tensors[t];
        if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) continue;
        const auto* first = static_cast<const char*>(tensor.const_data_ptr());
        ranges.push_back({first, first + tensor.nbytes(), list.name, t, is_written});
      }
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  const Range* reach = nullptr;          // the range so far with the largest end
  const Range* written_reach = nullptr;  // the written one
  for (const Range& range : ranges) {
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

// Statistics and their factors, orders[t] of them for tensor t.
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
  check_overlaps({{"out", out}}, {{"stats", stats}});
}

}  // namespace tnt
