// Checks memory safety and the contract before anything is written, converts tensors to pointers
// and calls the CPU kernels.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <pthread.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>

#include "check.h"
#include "cpu/blas.h"
#include "cpu/damped_inverse.h"
#include "cpu/grafted_directions.h"
#include "cpu/gram_ema.h"
#include "cpu/inverse_root.h"
#include "cpu/mode_products.h"
#include "cpu/preconditioned_step.h"
#include "cpu/scaled_step.h"

namespace tnt {
namespace {

// Whether PyTorch's setting allows products of float numbers that are rounded to bfloat16.
bool may_round() {
  return blas::multiplies_bfloat16() &&
         at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL) ==
             at::Float32Precision::BF16;
}

// Tells autograd that a kernel wrote through a pointer.
void mark_written(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

Element element_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return Element::kDouble;
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kHalf:
      return Element::kHalf;
    default:
      return Element::kFloat;
  }
}

// Of a tensor that the kernel reads, or writes after check_overlaps.
TensorView view_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), element_of(tensor), tensor.dim(), tensor.sizes().data(),
          tensor.strides().data()};
}

// The factors or statistics as the kernels read them. The list owns the copies.
std::vector<at::Tensor> contiguous(at::TensorList tensors) {
  std::vector<at::Tensor> list;
  list.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) list.push_back(tensor.contiguous());
  return list;
}

// The factors of a tensor, from the position `next` in a flat list.
std::vector<Factor> factors_of(const at::Tensor& tensor, const at::Tensor*& next) {
  std::vector<Factor> factors;
  factors.reserve(static_cast<size_t>(tensor.dim()));
  for (int64_t i = 0; i < tensor.dim(); ++i, ++next) {
    factors.push_back({next->const_data_ptr(), tensor.size(i), next->dim() == 1});
  }
  return factors;
}

void check_tensors(const char* name, at::TensorList tensors) {
  for (size_t t = 0; t < tensors.size(); ++t) check_tensor(name, t, tensors[t]);
}

// Refuses tensors that are too large for the BLAS, whose sizes have 32 bits.
void check_products(at::TensorList tensors, at::TensorList factors) {
  size_t next = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (const int64_t d : tensors[t].sizes()) {
      const int64_t rest = tensors[t].numel() / std::max<int64_t>(d, 1);
      TORCH_CHECK_VALUE(d <= 1 || factors[next].dim() == 1 || rest <= blas::kMaxSize,
                        entry("factors", next), " must be diagonal, (", d, ",): ", rest,
                        " numbers for each of its rows are more than the BLAS can count, ",
                        blas::kMaxSize);
      ++next;
    }
  }
}

// One statistic or factor for each mode of each tensor.
void check_modes(const char* name, at::TensorList modes, at::TensorList tensors, bool written) {
  size_t next = 0;
  for (const at::Tensor& tensor : tensors) {
    for (const int64_t d : tensor.sizes()) {
      if (next < modes.size()) check_mode(name, next, modes[next], d, tensor, written);
      ++next;
    }
  }
  check_length(name, modes.size(), next);
}

void gram_ema_op(at::TensorList stats, at::TensorList tensors, const at::Tensor& decay,
                 at::TensorList factors) {
  const double weight = checked_number("decay", decay, 1.0);
  check_tensors("tensors", tensors);
  check_modes("stats", stats, tensors, /*written=*/true);
  if (!factors.empty()) check_modes("factors", factors, tensors, /*written=*/false);
  if (!factors.empty()) check_products(tensors, factors);
  check_overlaps({{"stats", stats}}, {{"tensors", tensors}, {"factors", factors}});

  if (!factors.empty()) {
    const std::vector<at::Tensor> matrices = contiguous(factors);
    std::vector<WhitenedTensor> whitened;
    whitened.reserve(tensors.size());
    const at::Tensor* next = matrices.data();
    auto stat = stats.begin();
    for (const at::Tensor& tensor : tensors) {
      WhitenedTensor one{view_of(tensor), factors_of(tensor, next), {}, {}};
      for (int64_t i = 0; i < tensor.dim(); ++i, ++stat) {
        one.stats.push_back(stat->mutable_data_ptr());
        one.diagonal.push_back(stat->dim() == 1);
      }
      whitened.push_back(std::move(one));
    }
    whitened_gram_ema(whitened, weight, may_round());
    return mark_written(stats);
  }
  std::vector<GramMode> modes;
  modes.reserve(stats.size());
  for (const at::Tensor& tensor : tensors) {
    const TensorView view = view_of(tensor);
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      const at::Tensor& stat = stats[modes.size()];
      modes.push_back({view, i, stat.mutable_data_ptr(), stat.dim() == 1});
    }
  }
  gram_ema(modes, weight, may_round());
  mark_written(stats);
}

// Checks and converts the arguments of damped_inverse and inverse_root. `sources` owns copies.
std::vector<TensorModes> factor_modes(at::TensorList out, at::TensorList stats,
                                      at::IntArrayRef orders, std::vector<at::Tensor>& sources) {
  check_factors(out, stats, orders);
  sources = contiguous(stats);
  std::vector<TensorModes> tensors;
  tensors.reserve(orders.size());
  size_t next = 0;
  for (const int64_t order : orders) {
    TensorModes tensor{{}, element_of(stats[next])};
    for (int64_t i = 0; i < order; ++i, ++next) {
      tensor.modes.push_back({sources[next].const_data_ptr(), out[next].mutable_data_ptr(),
                              stats[next].size(0), stats[next].dim() == 1});
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

at::Tensor damped_inverse_op(at::TensorList out, at::TensorList stats, at::IntArrayRef orders,
                             const at::Tensor& damping, bool relative) {
  const double eps = checked_number("damping", damping);
  std::vector<at::Tensor> sources;
  const std::vector<TensorModes> tensors = factor_modes(out, stats, orders, sources);
  at::Tensor info = at::zeros(static_cast<int64_t>(orders.size()), at::kInt);
  damped_inverse(tensors, eps, relative, info.mutable_data_ptr<int32_t>());
  mark_written(out);
  return info;
}

at::Tensor inverse_root_op(at::TensorList out, at::TensorList stats, at::IntArrayRef orders,
                           const at::Tensor& damping, at::IntArrayRef roots) {
  const double eps = checked_number("damping", damping);
  check_length("roots", roots.size(), orders.size());
  for (const int64_t root : roots) {
    TORCH_CHECK_VALUE(root >= 1, "roots must be at least 1, got ", root);
  }
  std::vector<at::Tensor> sources;
  const std::vector<TensorModes> tensors = factor_modes(out, stats, orders, sources);
  at::Tensor info = at::zeros(static_cast<int64_t>(orders.size()), at::kInt);
  inverse_root(tensors, eps, roots.vec(), info.mutable_data_ptr<int32_t>());
  mark_written(out);
  return info;
}

std::vector<at::Tensor> mode_products_op(at::TensorList tensors, at::TensorList factors) {
  check_tensors("tensors", tensors);
  check_modes("factors", factors, tensors, /*written=*/false);
  check_products(tensors, factors);
  const std::vector<at::Tensor> matrices = contiguous(factors);
  std::vector<at::Tensor> results;
  std::vector<ModeProduct> products;
  results.reserve(tensors.size());
  products.reserve(tensors.size());
  const at::Tensor* next = matrices.data();
  for (const at::Tensor& tensor : tensors) {
    results.push_back(at::empty(tensor.sizes(), state_dtype(tensor)));
    use_large_pages(results.back().mutable_data_ptr(), results.back().nbytes());
    products.push_back(
        {view_of(tensor), factors_of(tensor, next), results.back().mutable_data_ptr()});
  }
  mode_products(products, may_round());
  return results;
}

void preconditioned_step_op(at::TensorList params, at::TensorList momenta, at::TensorList grads,
                            at::TensorList factors, const at::Tensor& lr,
                            const at::Tensor& momentum, const at::Tensor& weight_decay) {
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

  const std::vector<at::Tensor> matrices = contiguous(factors);
  std::vector<ParameterStep> steps;
  steps.reserve(params.size());
  const at::Tensor* next = matrices.data();
  for (size_t t = 0; t < params.size(); ++t) {
    steps.push_back(
        {view_of(params[t]), view_of(momenta[t]), view_of(grads[t]), factors_of(params[t], next)});
  }
  preconditioned_step(steps, alpha, mu, gamma, may_round());
  mark_written(params);
  mark_written(momenta);
}

void scaled_step_op(at::TensorList params, at::TensorList directions, const at::Tensor& lr,
                    const at::Tensor& weight_decay, const c10::List<bool>& decayed,
                    const at::Tensor& scales) {
  const double alpha = checked_number("lr", lr);
  const double gamma = checked_number("weight_decay", weight_decay);
  check_tensors("params", params);
  check_length("directions", directions.size(), params.size());
  check_length("decayed", decayed.size(), params.size());
  for (size_t t = 0; t < params.size(); ++t) {
    check_direction(t, directions[t], params[t]);
    check_writable("params", t, params[t]);
  }
  if (scales.numel() > 0) check_table("scales", scales, {static_cast<int64_t>(params.size())});
  check_overlaps({{"params", params}}, {{"directions", directions}});

  const at::Tensor table = scales.contiguous();
  std::vector<ScaledStep> steps;
  steps.reserve(params.size());
  for (size_t t = 0; t < params.size(); ++t) {
    const double scale = table.numel() > 0 ? table.const_data_ptr<double>()[t] : 1;
    steps.push_back({view_of(params[t]), view_of(directions[t]), alpha * scale,
                     decayed.get(t) ? alpha * gamma : 0});
  }
  scaled_step(steps);
  mark_written(params);
}

at::Tensor grafted_directions_op(at::TensorList momenta, at::TensorList second_moments,
                                 at::TensorList out, at::TensorList grads, at::TensorList factors,
                                 const at::Tensor& momentum, const at::Tensor& counts,
                                 double second_decay, double eps) {
  const bool adam = !second_moments.empty();
  const double mu = checked_number("momentum", momentum);
  TORCH_CHECK_VALUE(!adam || mu < 1, "momentum must be in [0, 1), got ", mu);
  TORCH_CHECK_VALUE(second_decay >= 0 && second_decay < 1, "second_decay must be in [0, 1), got ",
                    second_decay);
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), "eps must be finite and >= 0, got ", eps);
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

  const std::vector<at::Tensor> matrices = contiguous(factors);
  const at::Tensor table = counts.contiguous();
  std::vector<GraftedDirection> directions;
  directions.reserve(momenta.size());
  const at::Tensor* next = matrices.data();
  for (size_t t = 0; t < momenta.size(); ++t) {
    use_large_pages(out[t].mutable_data_ptr(), out[t].nbytes());
    GraftedDirection one{view_of(momenta[t]),       {},
                         view_of(grads[t]),         factors_of(momenta[t], next),
                         out[t].mutable_data_ptr(), {1, 1}};
    if (adam) {
      one.second_moment = view_of(second_moments[t]);
      const double* row = table.const_data_ptr<double>() + 2 * t;
      for (int i = 0; i < 2; ++i) {
        TORCH_CHECK_VALUE(row[i] >= 1, "counts must be at least 1, got ", row[i]);
        one.counts[i] = row[i];
      }
    }
    directions.push_back(std::move(one));
  }
  at::Tensor scales = at::zeros(static_cast<int64_t>(momenta.size()), at::kDouble);
  grafted_directions(directions, {mu, second_decay, eps, may_round()},
                     scales.mutable_data_ptr<double>());
  mark_written(momenta);
  mark_written(second_moments);
  mark_written(out);
  return scales;
}

}  // namespace

void register_cpu_kernels() {
  const char* wanted = std::getenv("TNT_BLAS");
  blas::choose_products(wanted ? wanted : "");
  pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  // Never freed: at exit, PyTorch's dispatcher may be gone first.
  auto& library = *new torch::Library(torch::Library::IMPL, "tnt_kernels", c10::DispatchKey::CPU,
                                      __FILE__, __LINE__);
  library.impl("gram_ema_", gram_ema_op);
  library.impl("damped_inverse", damped_inverse_op);
  library.impl("inverse_root", inverse_root_op);
  library.impl("mode_products", mode_products_op);
  library.impl("preconditioned_step_", preconditioned_step_op);
  library.impl("scaled_step_", scaled_step_op);
  library.impl("grafted_directions_", grafted_directions_op);
}

}  // namespace tnt
