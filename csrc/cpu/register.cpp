// Checks memory safety and the contract before anything is written, converts tensors to pointers
// and calls the CPU kernels.

#include <pthread.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/blas.h"
#include "cpu/operators.h"
#include "cpu/tasks.h"
#include "tensors.h"

namespace tnt {
namespace {

// Whether PyTorch's setting allows products of float numbers that are rounded to bfloat16. The C
// interface has no function for it, so this calls an operator in Python (backends.py).
bool may_round() {
  if (!blas::multiplies_bfloat16()) return false;
  StableIValue answer = 0;
  succeeded(torch_call_dispatcher("tnt_kernels::_may_round", "", &answer, TORCH_ABI_VERSION));
  return Convert<bool>::take(answer);
}

// The view of a tensor for a kernel. check_overlaps must have run before the kernel writes to it.
TensorView view_of(const Tensor& tensor) {
  return {tensor.data(), element_of(tensor), tensor.dim(), tensor.sizes().data(),
          tensor.strides().data()};
}

// Factors or statistics as the kernels read them. Copies, and owns, what is not contiguous.
struct Matrices {
  explicit Matrices(const TensorList& tensors) {
    data.reserve(tensors.size());
    for (const Tensor& tensor : tensors) {
      if (tensor.is_contiguous()) {
        data.push_back(tensor.data());
        continue;
      }
      copies.push_back(empty(tensor.sizes(), tensor.dtype()));
      void* copy = copies.back().mutable_data();
      // Not PyTorch's copy: in a forked child it would wait forever for the parent's threads.
      data.push_back(with_state(element_of(tensor), [&](auto zero) -> const void* {
        auto* buffer = static_cast<decltype(zero)*>(copy);
        return contiguous_data(view_of(tensor), buffer);
      }));
    }
  }

  std::vector<const void*> data;
  TensorList copies;
};

// Gives the factors of the next tensor at each call of `of`.
class Factors {
 public:
  explicit Factors(const TensorList& factors) : factors_(factors), matrices_(factors) {}

  std::vector<Factor> of(const Tensor& tensor) {
    std::vector<Factor> factors;
    factors.reserve(tensor.sizes().size());
    for (const int64_t d : tensor.sizes()) {
      factors.push_back({matrices_.data[next_], d, factors_[next_].dim() == 1});
      ++next_;
    }
    return factors;
  }

 private:
  const TensorList& factors_;
  const Matrices matrices_;
  size_t next_ = 0;
};

// A new tensor of zeros.
Tensor zeros(size_t count, Dtype dtype) {
  const auto size = static_cast<int64_t>(count);
  Tensor tensor = empty({&size, 1}, dtype);
  std::memset(tensor.mutable_data(), 0, tensor.nbytes());
  return tensor;
}

void check_tensors(const char* name, const TensorList& tensors) {
  for (size_t t = 0; t < tensors.size(); ++t) check_tensor(name, t, tensors[t]);
}

// Refuses tensors that are too large for a BLAS with 32-bit sizes.
void check_products(const TensorList& tensors, const TensorList& factors) {
  size_t next = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (const int64_t d : tensors[t].sizes()) {
      const int64_t rest = tensors[t].numel() / std::max<int64_t>(d, 1);
      TNT_CHECK(d <= 1 || factors[next].dim() == 1 || rest <= blas::kMaxSize,
                entry("factors", next), " must be diagonal, (", d, ",): ", rest,
                " numbers for each of its rows are more than the BLAS can count, ", blas::kMaxSize);
      ++next;
    }
  }
}

// One statistic or factor for each mode of each tensor.
void check_modes(const char* name, const TensorList& modes, const TensorList& tensors,
                 bool written) {
  size_t next = 0;
  for (const Tensor& tensor : tensors) {
    for (const int64_t d : tensor.sizes()) {
      if (next < modes.size()) check_mode(name, next, modes[next], d, tensor, written);
      ++next;
    }
  }
  check_length(name, modes.size(), next);
}

void gram_ema_op(const TensorList& stats, const TensorList& tensors, const Tensor& decay,
                 const TensorList& factors) {
  const double weight = checked_number("decay", decay, 1.0);
  check_tensors("tensors", tensors);
  check_modes("stats", stats, tensors, /*written=*/true);
  if (!factors.empty()) check_modes("factors", factors, tensors, /*written=*/false);
  if (!factors.empty()) check_products(tensors, factors);
  check_overlaps({{"stats", stats}}, {{"tensors", tensors}, {"factors", factors}});

  if (!factors.empty()) {
    Factors matrices(factors);
    std::vector<WhitenedTensor> whitened;
    whitened.reserve(tensors.size());
    auto stat = stats.begin();
    for (const Tensor& tensor : tensors) {
      WhitenedTensor one{view_of(tensor), matrices.of(tensor), {}, {}};
      for (int64_t i = 0; i < tensor.dim(); ++i, ++stat) {
        one.stats.push_back(stat->mutable_data());
        one.diagonal.push_back(stat->dim() == 1);
      }
      whitened.push_back(std::move(one));
    }
    whitened_gram_ema(whitened, weight, may_round());
    return;
  }
  std::vector<GramMode> modes;
  modes.reserve(stats.size());
  for (const Tensor& tensor : tensors) {
    const TensorView view = view_of(tensor);
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      const Tensor& stat = stats[modes.size()];
      modes.push_back({view, i, stat.mutable_data(), stat.dim() == 1});
    }
  }
  gram_ema(modes, weight, may_round());
}

// Converts the checked arguments of damped_inverse and inverse_root.
std::vector<TensorModes> factor_modes(const TensorList& out, const TensorList& stats,
                                      const std::vector<int64_t>& orders, const Matrices& sources) {
  std::vector<TensorModes> tensors;
  tensors.reserve(orders.size());
  size_t next = 0;
  for (const int64_t order : orders) {
    TensorModes tensor{{}, element_of(stats[next])};
    for (int64_t i = 0; i < order; ++i, ++next) {
      tensor.modes.push_back({sources.data[next], out[next].mutable_data(), stats[next].size(0),
                              stats[next].dim() == 1});
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

Tensor damped_inverse_op(const TensorList& out, const TensorList& stats,
                         const std::vector<int64_t>& orders, const Tensor& damping, bool relative) {
  const double eps = checked_number("damping", damping);
  check_factors(out, stats, orders);
  const Matrices sources(stats);
  const std::vector<TensorModes> tensors = factor_modes(out, stats, orders, sources);
  Tensor info = zeros(orders.size(), kInt);
  damped_inverse(tensors, eps, relative, static_cast<int32_t*>(info.mutable_data()));
  return info;
}

Tensor inverse_root_op(const TensorList& out, const TensorList& stats,
                       const std::vector<int64_t>& orders, const Tensor& damping,
                       const std::vector<int64_t>& roots, bool relative) {
  const double eps = checked_number("damping", damping);
  check_length("roots", roots.size(), orders.size());
  for (const int64_t root : roots) {
    TNT_CHECK(root >= 1, "roots must be at least 1, got ", root);
  }
  check_factors(out, stats, orders);
  const Matrices sources(stats);
  Tensor info = zeros(orders.size(), kInt);
  inverse_root(factor_modes(out, stats, orders, sources), eps, relative, roots,
               static_cast<int32_t*>(info.mutable_data()));
  return info;
}

TensorList mode_products_op(const TensorList& tensors, const TensorList& factors) {
  check_tensors("tensors", tensors);
  check_modes("factors", factors, tensors, /*written=*/false);
  check_products(tensors, factors);
  Factors matrices(factors);
  TensorList results;
  std::vector<ModeProduct> products;
  results.reserve(tensors.size());
  products.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    results.push_back(empty(tensor.sizes(), state_dtype(tensor)));
    use_large_pages(results.back().mutable_data(), results.back().nbytes());
    products.push_back({view_of(tensor), matrices.of(tensor), results.back().mutable_data()});
  }
  mode_products(products, may_round());
  return results;
}

void preconditioned_step_op(const TensorList& params, const TensorList& momenta,
                            const TensorList& grads, const TensorList& factors, const Tensor& lr,
                            const Tensor& momentum, const Tensor& weight_decay) {
  const double alpha = checked_number("lr", lr), mu = checked_number("momentum", momentum);
  const double gamma = checked_number("weight_decay", weight_decay);
  check_tensors("params", params);
  check_modes("factors", factors, params, /*written=*/false);
  check_products(params, factors);
  check_length("momenta", momenta.size(), params.size());
  check_length("grads", grads.size(), params.size());
  for (size_t t = 0; t < params.size(); ++t) {
    check_momentum(t, momenta[t], grads[t], params[t]);
    check_writable("params", t, params[t]);
  }
  check_overlaps({{"params", params}, {"momenta", momenta}},
                 {{"grads", grads}, {"factors", factors}});

  Factors matrices(factors);
  std::vector<ParameterStep> steps;
  steps.reserve(params.size());
  for (size_t t = 0; t < params.size(); ++t) {
    steps.push_back(
        {view_of(params[t]), view_of(momenta[t]), view_of(grads[t]), matrices.of(params[t])});
  }
  preconditioned_step(steps, alpha, mu, gamma, may_round());
}

void scaled_step_op(const TensorList& params, const TensorList& directions, const Tensor& lr,
                    const Tensor& weight_decay, const std::vector<bool>& decayed,
                    const Tensor& scales) {
  const double alpha = checked_number("lr", lr);
  const double gamma = checked_number("weight_decay", weight_decay);
  check_tensors("params", params);
  check_length("directions", directions.size(), params.size());
  check_length("decayed", decayed.size(), params.size());
  for (size_t t = 0; t < params.size(); ++t) {
    check_state("directions", t, directions[t], params[t]);
    check_writable("params", t, params[t]);
  }
  if (scales.numel() > 0) check_table("scales", scales, {static_cast<int64_t>(params.size())});
  check_overlaps({{"params", params}}, {{"directions", directions}});

  const auto* table = static_cast<const double*>(scales.data());
  std::vector<ScaledStep> steps;
  steps.reserve(params.size());
  for (size_t t = 0; t < params.size(); ++t) {
    const double scale = scales.numel() > 0 ? table[static_cast<int64_t>(t) * scales.stride(0)] : 1;
    steps.push_back({view_of(params[t]), view_of(directions[t]), alpha * scale,
                     decayed[t] ? alpha * gamma : 0});
  }
  scaled_step(steps);
}

Tensor grafted_directions_op(const TensorList& momenta, const TensorList& second_moments,
                             const TensorList& out, const TensorList& grads,
                             const TensorList& factors, const Tensor& momentum,
                             const Tensor& counts, double second_decay, double eps, bool nesterov) {
  const bool adam = !second_moments.empty();
  const double mu = checked_number("momentum", momentum);
  TNT_CHECK(!adam || mu < 1, "momentum must be in [0, 1), got ", mu);
  TNT_CHECK(second_decay >= 0 && second_decay < 1, "second_decay must be in [0, 1), got ",
            second_decay);
  TNT_CHECK(eps >= 0 && std::isfinite(eps), "eps must be finite and >= 0, got ", eps);
  check_length("grads", grads.size(), momenta.size());
  check_length("out", out.size(), momenta.size());
  for (size_t t = 0; t < momenta.size(); ++t) {
    check_momentum(t, momenta[t], grads[t], momenta[t]);
    check_like("out", t, out[t], "momenta", momenta[t]);
    check_contiguous("out", t, out[t]);
  }
  check_modes("factors", factors, momenta, /*written=*/false);
  check_products(momenta, factors);
  if (adam) {
    check_length("second_moments", second_moments.size(), momenta.size());
    check_table("counts", counts, {static_cast<int64_t>(momenta.size()), 2});
    for (size_t t = 0; t < momenta.size(); ++t) {
      check_like("second_moments", t, second_moments[t], "momenta", momenta[t]);
      check_writable("second_moments", t, second_moments[t]);
    }
  }
  check_overlaps({{"momenta", momenta}, {"second_moments", second_moments}, {"out", out}},
                 {{"grads", grads}, {"factors", factors}});

  Factors matrices(factors);
  const auto* table = static_cast<const double*>(counts.data());
  std::vector<GraftedDirection> directions;
  directions.reserve(momenta.size());
  for (size_t t = 0; t < momenta.size(); ++t) {
    use_large_pages(out[t].mutable_data(), out[t].nbytes());
    GraftedDirection one{view_of(momenta[t]),   {},    view_of(grads[t]), matrices.of(momenta[t]),
                         out[t].mutable_data(), {1, 1}};
    if (adam) {
      one.second_moment = view_of(second_moments[t]);
      const double* row = table + static_cast<int64_t>(t) * counts.stride(0);
      for (int i = 0; i < 2; ++i) {
        one.counts[i] = row[i * counts.stride(1)];
        TNT_CHECK(one.counts[i] >= 1, "counts must be at least 1, got ", one.counts[i]);
      }
    }
    directions.push_back(std::move(one));
  }
  const int64_t shape[] = {static_cast<int64_t>(momenta.size()), 2};
  Tensor norms = empty(shape, kDouble);
  grafted_directions(directions, {mu, second_decay, eps, nesterov, may_round()},
                     static_cast<double*>(norms.mutable_data()));
  return norms;
}

// Calls use(name, Boxed) for every operator, in the order of tnt_kernels/operators/__init__.py.
template <typename Use>
void each_operator(const Use& use) {
  use("gram_ema_", Boxed<gram_ema_op>());
  use("damped_inverse", Boxed<damped_inverse_op>());
  use("inverse_root", Boxed<inverse_root_op>());
  use("mode_products", Boxed<mode_products_op>());
  use("preconditioned_step_", Boxed<preconditioned_step_op>());
  use("scaled_step_", Boxed<scaled_step_op>());
  use("grafted_directions_", Boxed<grafted_directions_op>());
}

}  // namespace

// A line for each operator: its name and its types.
std::string signatures() {
  std::string lines;
  each_operator([&](const char* name, auto boxed) { lines += name + boxed.signature() + "\n"; });
  return lines;
}

// Throws std::invalid_argument if TNT_BLAS names no BLAS.
void register_operators() {
  const char* wanted = std::getenv("TNT_BLAS");
  blas::choose_products(wanted ? wanted : "");
  pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  // Never freed: at exit, PyTorch's dispatcher may be gone first.
  TorchLibraryHandle library = nullptr;
  succeeded(aoti_torch_library_init_impl("tnt_kernels", "CPU", "register.cpp", __LINE__, &library));
  each_operator([&](const char* name, auto boxed) {
    succeeded(torch_library_impl(library, name, boxed.call, TORCH_ABI_VERSION));
  });
}

}  // namespace tnt
