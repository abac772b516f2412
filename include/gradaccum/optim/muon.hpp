// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/optim/optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// How a matrix's shape changes its rate. `original`: times sqrt(max(1, rows / columns)). `match_rms_adamw`: times
/// 0.2 sqrt(max(rows, columns)), so that rates and weight decays of AdamW fit. `spectral_unclamped`: times
/// sqrt(rows / columns).
enum class MuonAdjustLr { original, match_rms_adamw, spectral_unclamped };

/// The options of `Muon`: Python's, and also `flatten` and `ns_dtype`.
struct MuonOptions : OwnOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3) : lr_(lr) {}
  using ns_coefficients_t = std::tuple<double, double, double>;
  TORCH_ARG(double, lr);                                                      ///< before its adjustment
  TORCH_ARG(double, weight_decay) = 0.1;                                      ///< decoupled from the gradient
  TORCH_ARG(double, momentum) = 0.95;                                         ///< of the moving average
  TORCH_ARG(bool, nesterov) = true;                                           ///< averages once more
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = {3.4445, -4.7750, 2.0315};  ///< of Newton and Schulz's polynomial
  TORCH_ARG(double, eps) = 1e-7;                                              ///< the least norm of a direction
  TORCH_ARG(std::int64_t, ns_steps) = 5;                                      ///< iterations, less than 100
  TORCH_ARG(MuonAdjustLr, adjust_lr_fn) = MuonAdjustLr::original;             ///< how shapes change the rate
  TORCH_ARG(bool, flatten) = false;  ///< takes parameters of more dimensions, as matrices of [out, all others]
  TORCH_ARG(at::ScalarType, ns_dtype) = at::ScalarType::Undefined;  ///< of the iterations; see `Muon::ns_dtype`

 public:
  static auto all(auto& of) {
    return std::tuple(named("lr", of.lr_), named("weight_decay", of.weight_decay_), named("momentum", of.momentum_),
                      named("nesterov", of.nesterov_), named("ns_coefficient", of.ns_coefficients_),
                      named("eps", of.eps_), named("ns_steps", of.ns_steps_), named("adjust_lr_fn", of.adjust_lr_fn_),
                      named("flatten", of.flatten_), named("ns_dtype", of.ns_dtype_));
  }
  void check() const;
};

/// Muon: steps whose singular values are all about 1, for the matrices of hidden layers. Biases, norms, embeddings and
/// the output layer, which names tell from the others, need another optimizer:
///
///     std::vector<at::Tensor> matrices, others;
///     for (auto& p : model->parameters()) (p.dim() == 2 ? matrices : others).push_back(p);
///     ga::optim::Muon muon(matrices, ga::optim::MuonOptions(0.02));
///     ga::optim::AdamW adamw(others, ga::optim::AdamWOptions(1e-3));
///     ga::optim::MultiOptimizer both(muon, adamw);
///     torch::mse_loss(model->forward(x), y).backward();
///     both.step();
///
/// Muon: An optimizer for hidden layers in neural networks, Jordan et al., 2024; `torch.optim.Muon`, whose options,
/// arithmetic and state these are. A step averages the gradients, makes the direction orthogonal by a few iterations of
/// Newton and Schulz, and subtracts it. Matrices of equal shape are multiplied together. The first pass also applies a
/// window's deferred factor, and the last may round stochastically.
///
/// Parameters: real, with two dimensions, or more with `flatten`; any strides. Gradients: dense. State: one float32
/// tensor, float64 for float64 parameters. Throws for other parameters, and if one is listed twice.
///
/// @note Does not synchronize. On a device without this library's kernels, ATen runs both passes.
/// @note Memory: the directions of all matrices, 2 or 4 bytes per element, and up to four tensors for products, of 4
/// million elements each, or of one matrix.
class Muon : public OwnOptimizer<Muon, MuonOptions, ElementState<MuonDirectionStep>> {
 public:
  static constexpr const char* name = "Muon";

  using OnePassOptimizer::OnePassOptimizer;  // takes parameters or groups of them, and options

  static void check(const MuonOptions& options) { options.check(); }
  /// Throws if a parameter is no matrix.
  static void check_group(const torch::optim::OptimizerParamGroup& group);
  /// Returns the dtype in which a parameter's direction is made orthogonal: the option of that name, or float64 for
  /// float64 parameters, else bfloat16 where `is_bf16_fast`, as in PyTorch, else float32. Set the option where machines
  /// that differ must have the same results.
  static at::ScalarType ns_dtype(const MuonOptions& options, const at::Tensor& parameter);
  bool steps_by_elements() const override { return false; }  // products run over whole matrices

 private:
  GRADACCUM_INLINE detail::PreparedStep prepare_steps(const detail::GradientOf& gradient_of,
                                                      const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/muon.ipp>
#endif
