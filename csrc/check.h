// Argument checks whose errors name the argument, the rule and the value.
//
// Lists are flat here, as in direct calls of torch.ops.tnt_kernels. The functions in
// tnt_kernels/operators check nested lists, and name their entries stats[t][i].
#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/views.h"
#include "tensors.h"

namespace tnt {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// A macro, so that the parts of the message are built only for an error.
#define TNT_CHECK(condition, ...) \
  if (!(condition)) ::tnt::refuse(__VA_ARGS__)

// The dtype of a tensor's statistics, factors and momenta.
inline Dtype state_dtype(const Tensor& tensor) {
  return tensor.dtype() == kDouble ? kDouble : kFloat;
}

// An entry's name in a message; it is built only for an error.
inline std::string entry(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

inline void check_length(const char* name, size_t got, size_t wanted) {
  TNT_CHECK(got == wanted, name, " must have ", wanted, " entries, got ", got);
}

// The element type of a tensor whose dtype the kernels read.
inline Element element_of(const Tensor& tensor) {
  if (tensor.dtype() == kDouble) return Element::kDouble;
  if (tensor.dtype() == kBFloat16) return Element::kBFloat16;
  return tensor.dtype() == kHalf ? Element::kHalf : Element::kFloat;
}

inline bool is_floating_point(const Tensor& tensor) {
  const Dtype dtype = tensor.dtype();
  return dtype == kFloat || dtype == kDouble || dtype == kBFloat16 || dtype == kHalf;
}

inline double checked_number(const char* name, const Tensor& value,
                             double high = std::numeric_limits<double>::max()) {
  TNT_CHECK(value.is_dense_on_cpu() && value.dim() == 0 && is_floating_point(value), name,
            " must be a 0-dim floating-point tensor, got ", value.sizes(), ", ", value.dtype());
  double number = 0;
  with_element(element_of(value), [&](auto* element) {
    number = convert<double>(*static_cast<decltype(element)>(value.data()));
  });
  TNT_CHECK(number >= 0 && number <= high, name, " must be in [0, ", high, "], got ", number);
  return number;
}

inline void check_dense(const char* list, size_t t, const Tensor& tensor) {
  TNT_CHECK(tensor.is_dense_on_cpu(), entry(list, t), " must be a dense tensor on the CPU");
}

// A tensor of at least one mode and a supported dtype.
inline void check_tensor(const char* list, size_t t, const Tensor& tensor) {
  check_dense(list, t, tensor);
  TNT_CHECK(is_floating_point(tensor), entry(list, t),
            " must be float32, float64, bfloat16 or float16, got ", tensor.dtype());
  TNT_CHECK(tensor.dim() >= 1, entry(list, t), " must have at least one mode, got none");
  TNT_CHECK(tensor.dim() <= static_cast<int64_t>(kMostDimensions), entry(list, t),
            " must have at most ", kMostDimensions, " modes, got ", tensor.dim());
}

// Memory that a kernel writes: no two elements may share an address, so each stride must be larger
// than all offsets of the smaller ones. (PyTorch's dispatcher resolves or refuses negated and zero
// views.)
inline void check_writable(const char* list, size_t t, const Tensor& tensor) {
  if (tensor.is_contiguous() || tensor.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dimensions.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dimensions) {
    TNT_CHECK(stride > reach, entry(list, t),
              " must have memory of its own for each element, got strides ", tensor.strides());
    reach += stride * (size - 1);
  }
}

inline void check_contiguous(const char* list, size_t t, const Tensor& tensor) {
  check_writable(list, t, tensor);
  TNT_CHECK(tensor.is_contiguous(), entry(list, t), " must be contiguous, got strides ",
            tensor.strides());
}

// A statistic or factor of a mode of size d of `tensor`: (d, d), or (d,) for a diagonal mode.
inline void check_mode(const char* list, size_t t, const Tensor& mode, int64_t d,
                       const Tensor& tensor, bool written) {
  check_dense(list, t, mode);
  const bool full = mode.dim() == 2 && mode.size(0) == d && mode.size(1) == d;
  TNT_CHECK(full || (mode.dim() == 1 && mode.size(0) == d), entry(list, t), " must be (", d, ", ",
            d, ") or (", d, ",), got ", mode.sizes());
  TNT_CHECK(mode.dtype() == state_dtype(tensor), entry(list, t), " must be ", state_dtype(tensor),
            " for a ", tensor.dtype(), " tensor, got ", mode.dtype());
  if (written) check_contiguous(list, t, mode);
}

// A tensor with the shape and dtype of another one.
inline void check_like(const char* list, size_t t, const Tensor& tensor, const char* other_list,
                       const Tensor& other) {
  check_dense(list, t, tensor);
  TNT_CHECK(tensor.sizes() == other.sizes() && tensor.dtype() == other.dtype(), entry(list, t),
            " must be like ", entry(other_list, t), ", ", other.sizes(), " ", other.dtype(),
            ", got ", tensor.sizes(), " ", tensor.dtype());
}

// A statistic and its factor, of a tensor whose first statistic is `first`.
inline void check_factor_pair(size_t t, const Tensor& stat, const Tensor& out,
                              const Tensor& first) {
  check_dense("stats", t, stat);
  const auto dtype = stat.dtype();
  TNT_CHECK((dtype == kFloat || dtype == kDouble) && dtype == first.dtype(), entry("stats", t),
            " must be float32 or float64, one dtype for each tensor, got ", dtype);
  TNT_CHECK(stat.dim() == 1 || (stat.dim() == 2 && stat.size(0) == stat.size(1)), entry("stats", t),
            " must be (d, d) or (d,), got ", stat.sizes());
  check_like("out", t, out, "stats", stat);
  check_contiguous("out", t, out);
}

// A momentum or direction of a tensor: of its shape and its state's dtype.
inline void check_state(const char* list, size_t t, const Tensor& state, const Tensor& tensor) {
  check_tensor(list, t, state);
  TNT_CHECK(state.sizes() == tensor.sizes(), entry(list, t), " must be ", tensor.sizes(), ", got ",
            state.sizes());
  TNT_CHECK(state.dtype() == state_dtype(tensor), entry(list, t), " must be ", state_dtype(tensor),
            ", got ", state.dtype());
}

// The momentum and the gradient of `tensor`, which is a parameter or the momentum itself.
inline void check_momentum(size_t t, const Tensor& momentum, const Tensor& grad,
                           const Tensor& tensor) {
  check_state("momenta", t, momentum, tensor);
  check_tensor("grads", t, grad);
  TNT_CHECK(grad.sizes() == tensor.sizes(), entry("grads", t), " must be ", tensor.sizes(),
            ", got ", grad.sizes());
  check_writable("momenta", t, momentum);
}

// A table with numbers for each tensor of a list.
inline void check_table(const char* name, const Tensor& table, std::vector<int64_t> sizes) {
  TNT_CHECK(table.is_dense_on_cpu() && table.dtype() == kDouble && table.sizes() == Numbers(sizes),
            name, " must be ", Numbers(sizes), " float64 on the CPU, got ", table.sizes(), ", ",
            table.dtype());
}

// A term c * stride of a sum, with low <= c <= high.
struct Term {
  int64_t stride, low, high;
};

// Whether the terms, the largest stride first, can add up to `sum`. Returns true, too, when `tries`
// are used up: strides that do not nest have many combinations.
inline bool can_add_up(const Term* term, const Term* end, int64_t sum, int& tries) {
  if (term == end) return sum == 0;
  int64_t low = 0, high = 0;  // the range of the other terms
  for (const Term* other = term + 1; other < end; ++other) {
    low += other->stride * other->low;
    high += other->stride * other->high;
  }
  const auto floor_of = [&](int64_t a) {
    return a / term->stride - (a % term->stride < 0 ? 1 : 0);
  };
  const int64_t last = std::min(term->high, floor_of(sum - low));
  for (int64_t c = std::max(term->low, -floor_of(high - sum)); c <= last; ++c) {
    if (--tries < 0 || can_add_up(term + 1, end, sum - c * term->stride, tries)) return true;
  }
  return false;
}

// Whether two tensors share a byte; views with gaps may interleave. Exact for nested strides.
inline bool share_memory(const Tensor& a, const Tensor& b) {
  std::vector<Term> terms;
  const auto add = [&](int64_t stride, int64_t low, int64_t high) {
    const auto same = std::find_if(terms.begin(), terms.end(),
                                   [&](const Term& term) { return term.stride == stride; });
    if (same == terms.end()) {
      terms.push_back({stride, low, high});
    } else {
      *same = {stride, same->low + low, same->high + high};
    }
  };
  for (const Tensor* tensor : {&a, &b}) {
    const auto item = tensor->element_size();
    const auto dimension = [&](int64_t stride, int64_t size) {
      if (size > 1 && stride > 0)
        tensor == &a ? add(stride, 0, size - 1) : add(stride, 1 - size, 0);
    };
    for (int64_t i = 0; i < tensor->dim(); ++i)
      dimension(item * tensor->stride(i), tensor->size(i));
    dimension(1, item);
  }
  std::sort(terms.begin(), terms.end(),
            [](const Term& x, const Term& y) { return x.stride > y.stride; });
  int tries = 1000;
  const int64_t offset = static_cast<const char*>(b.data()) - static_cast<const char*>(a.data());
  return can_add_up(terms.data(), terms.data() + terms.size(), offset, tries);
}

struct NamedList {
  const char* name;
  const TensorList& tensors;
};

// Refuses written memory that appears twice in a call.
inline void check_overlaps(std::initializer_list<NamedList> written,
                           std::initializer_list<NamedList> read) {
  struct Range {
    const char *first, *last;
    const char* list;
    size_t index;
    bool written;
    const Tensor* tensor;
  };
  std::vector<Range> ranges;
  for (const bool is_written : {true, false}) {
    for (const NamedList& list : is_written ? written : read) {
      for (size_t t = 0; t < list.tensors.size(); ++t) {
        const Tensor& tensor = list.tensors[t];
        if (tensor.numel() == 0) continue;
        // mutable_data() gives a lazy copy its own memory before it is written.
        const auto* first =
            static_cast<const char*>(is_written ? tensor.mutable_data() : tensor.data());
        int64_t reach = 1;
        for (int64_t i = 0; i < tensor.dim(); ++i) reach += tensor.stride(i) * (tensor.size(i) - 1);
        const char* last = first + reach * tensor.element_size();
        ranges.push_back({first, last, list.name, t, is_written, &tensor});
      }
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  std::vector<const Range*> open;  // ranges that reach beyond the next one's start
  for (const Range& range : ranges) {
    std::erase_if(open, [&](const Range* other) { return other->last <= range.first; });
    for (const Range* other : open) {
      TNT_CHECK(!(range.written || other->written) || !share_memory(*range.tensor, *other->tensor),
                entry(range.list, range.index), " must not share memory with ",
                entry(other->list, other->index), ": one of them is written");
    }
    open.push_back(&range);
  }
}

// Statistics and their factors, orders[t] of them for tensor t.
inline void check_factors(const TensorList& out, const TensorList& stats,
                          const std::vector<int64_t>& orders) {
  auto rest = static_cast<int64_t>(stats.size());
  for (const int64_t order : orders) {
    TNT_CHECK(order >= 1, "orders must be at least 1, got ", order);
    TNT_CHECK(order <= rest, "orders must sum to the length of stats, ", stats.size(), ", got ",
              Numbers(orders));
    rest -= order;
  }
  TNT_CHECK(rest == 0, "orders must sum to the length of stats, ", stats.size(), ", got ",
            Numbers(orders));
  check_length("out", out.size(), stats.size());
  size_t next = 0;
  for (const int64_t order : orders) {
    const Tensor& first = stats[next];
    for (int64_t i = 0; i < order; ++i, ++next) {
      check_factor_pair(next, stats[next], out[next], first);
    }
  }
  check_overlaps({{"out", out}}, {{"stats", stats}});
}

}  // namespace tnt
