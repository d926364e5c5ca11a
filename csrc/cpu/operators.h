// The operators on pointers, which register.cpp calls.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/chain.h"
#include "cpu/factor_modes.h"
#include "cpu/views.h"

namespace tnt {

// Products of a tensor with a factor in every mode are contiguous, and double for a double tensor,
// else float, like their factors. `rounded`: operands may be rounded to bfloat16, as in
// chain_product.

// One mode of one tensor, and its statistic: row-major (d, d), or (d,) if diagonal; double for
// double tensors, else float.
struct GramMode {
  TensorView tensor;
  int64_t mode;
  void* stat;
  bool diagonal;
  double weight = 1;  // of the Gram matrix
};

// S <- decay S + (1 - decay) mat_i(G) mat_i(G)^T for every mode, symmetric to the bit. Reads only
// the lower triangle of S: nothing of S if decay is 0, neither S nor G if it is 1.
// `rounded` takes copies of half the tensors' size. Ren & Goldfarb 2021, Algorithm 2.
void gram_ema(const std::vector<GramMode>& modes, double decay, bool rounded);

// A tensor, its statistics, mode after mode, and the factors A_j that whiten it.
struct WhitenedTensor {
  TensorView tensor;
  std::vector<Factor> factors;
  std::vector<void*> stats;
  std::vector<bool> diagonal;
};

// S_i <- decay S_i + (1 - decay) s_i mat_i(P_i) mat_i(G)^T with P_i = G x_{j != i} A_j, for every
// mode. s_i gives the Gram matrix the trace |G|^2; it is 0 if that trace is not positive.
void whitened_gram_ema(const std::vector<WhitenedTensor>& tensors, double decay, bool rounded);

// A Cholesky pivot of at most this many roundings of its diagonal entry counts as zero.
constexpr int kPivotRoundings = 16;

// A_i = (U_i + eps I)^-1 for every mode of every tensor. U_i are the statistics, rescaled to one
// average eigenvalue c; eps is the damping, or damping c if relative (1 if c is 0). info[t] is 0,
// or i + 1 if mode i is the first that is not finite or not positive definite; then the tensor's
// `out` are kept. Ren & Goldfarb 2021, equation 13 and Algorithm 2.
void damped_inverse(const std::vector<TensorModes>& tensors, double damping, bool relative,
                    int32_t* info);

// The error of an eigenvalue in units of sqrt(d) eps |S|: two to three times the largest that was
// measured for the smallest eigenvalue, 0.19 at d = 30, 250 and 1000.
constexpr double kEigenvalueRoundings = 0.5;

// A_i = (S_i + damping I)^(-1/roots[t]) for every mode of every tensor t; `info` and `out` as in
// damped_inverse. A relative damping first replaces S_i by S_i + damping tr(S_i) / d I, or by
// S_i + I if S_i counts as zero; nothing is then added to its eigenvalues. Only the lower triangle
// (row-major) of a statistic is read. Ren & Goldfarb 2021, Algorithm 4; Anil et al. 2021.
//
// Eigenvalues of S_i that are negative only by roundings of S_i, down to
//   -kEigenvalueRoundings sqrt(d) eps(dtype of S_i) lambda_max,
// count as 0. A mode fails if an entry of S_i or A_i is not finite, or if an eigenvalue + damping
// is not above the roundings of float64, kEigenvalueRoundings sqrt(d) eps(double) lambda_max.
void inverse_root(std::vector<TensorModes> tensors, double damping, bool relative,
                  const std::vector<int64_t>& roots, int32_t* info);

// G, its factors and the product.
struct ModeProduct {
  TensorView tensor;
  std::vector<Factor> factors;
  void* out;
};

// out <- G x_1 A_1 ... x_k A_k for every tensor. Ren & Goldfarb 2021, equation 10.
void mode_products(const std::vector<ModeProduct>& products, bool rounded);

// Writes W and m. m is double for a double W, else float; the factors have m's type.
struct ParameterStep {
  TensorView param;
  TensorView momentum;
  TensorView grad;
  std::vector<Factor> factors;
};

// m <- momentum m + g;  W <- W - lr (m x_1 A_1 ... x_k A_k + weight_decay W), for every parameter.
// Ren & Goldfarb 2021, Algorithm 2.
void preconditioned_step(const std::vector<ParameterStep>& steps, double lr, double momentum,
                         double weight_decay, bool rounded);

// W, its direction P, and the rates of both. P is double for a double W, else float.
struct ScaledStep {
  TensorView param;
  TensorView direction;
  double rate, decay;
};

// W <- W - (rate P + decay W) for every parameter, rounded once.
void scaled_step(const std::vector<ScaledStep>& steps);

// Writes m, v if there is one, and the direction. `counts` are the numbers of updates of m and v,
// this one included.
struct GraftedDirection {
  TensorView momentum;
  TensorView second_moment;  // of Adam; without data, the norm of the momentum is grafted
  TensorView grad;
  std::vector<Factor> factors;
  void* out;
  double counts[2];
};

struct GraftRates {
  double momentum, second_decay, eps;
  bool nesterov, rounded;
};

// m <- momentum m + g;  v <- second_decay v + (1 - second_decay) g^2;  P = n x_1 A_1 ... x_k A_k,
// n = m, or momentum m + g with nesterov; norms[2 t] = |R| and norms[2 t + 1] = |P| for every
// tensor t; R is Adam's bias-corrected direction with the numerator n, or n. Ren & Goldfarb 2021,
// Algorithm 2; Agarwal et al. 2020.
void grafted_directions(const std::vector<GraftedDirection>& directions, const GraftRates& rates,
                        double* norms);

}  // namespace tnt
