// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// The formulas of an implementation. `paper`, as in transformers: eps1 is added to the squared gradient, and weight
/// decay subtracts `weight_decay * step size` times the parameter. `pytorch`: the mean of row_var is at least eps1, the
/// estimate at least eps1^2, and weight decay subtracts `weight_decay * lr` times the parameter.
enum class AdafactorVariant { paper, pytorch };

/// The options of `Adafactor`: step sizes, decays and the variant.
struct AdafactorOptions : OwnOptions<AdafactorOptions> {
  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}
  using eps_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);                    ///< the step size; with relative_step its maximum
  TORCH_ARG(double, beta2_decay) = -0.8;    ///< beta2 at step t is 1 - t^beta2_decay
  TORCH_ARG(eps_t, eps) = {1e-30, 1e-3};    ///< regularizes the squared gradient; the least RMS for scale_parameter
  TORCH_ARG(double, d) = 1.0;               ///< updates with a larger RMS are clipped to it
  TORCH_ARG(double, weight_decay) = 0.0;    ///< decoupled from the gradient; see `AdafactorVariant`
  TORCH_ARG(double, beta1) = 0.0;           ///< for a moving average of the updates; 0: no average
  TORCH_ARG(bool, relative_step) = true;    ///< the step size is min(lr, 1 / sqrt(t)), otherwise lr
  TORCH_ARG(bool, warmup_init) = false;     ///< with relative_step: the step size is min(1e-6 t, 1 / sqrt(t))
  TORCH_ARG(bool, scale_parameter) = true;  ///< multiplies the step size by the parameter's RMS
  TORCH_ARG(AdafactorVariant, variant) = AdafactorVariant::paper;  ///< selects the formulas

 public:
  static auto all(auto& of) {
    return std::tuple(named("lr", of.lr_), named("beta2_decay", of.beta2_decay_), named("eps", of.eps_),
                      named("d", of.d_), named("weight_decay", of.weight_decay_), named("beta1", of.beta1_),
                      named("relative_step", of.relative_step_), named("warmup_init", of.warmup_init_),
                      named("scale_parameter", of.scale_parameter_), named("variant", of.variant_));
  }
  AdafactorOptions inherit(const AdafactorOptions& from) const {
    auto options = OwnOptions::inherit(from);
    if (!options.relative_step()) options.warmup_init(false);  // such a group cannot have it
    return options;
  }
  void check() const;
};

/// The state of a parameter: row_var and col_var for a matrix, or for each matrix of its last two dimensions; variance
/// for a tensor with fewer dimensions.
struct AdafactorParamState : public OwnParamState {
  TORCH_ARG(at::Tensor, row_var);  ///< [..., rows, 1]
  TORCH_ARG(at::Tensor, col_var);  ///< [..., 1, columns]
  TORCH_ARG(at::Tensor, variance);
  TORCH_ARG(at::Tensor, exp_avg);  ///< only if beta1 > 0

 public:
  GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> tensors() override;
  GRADACCUM_INLINE void check(const at::Tensor& parameter) const override;
  /// Creates missing state for the next step, and converts loaded state to the dtype and order that it needs.
  void prepare(const at::Tensor& parameter, bool momentum);
};

/// Adafactor: steps like Adam's, with a row and a column of state per matrix rather than two numbers per element.
///
///     ga::optim::Adafactor adafactor(model->parameters());
///     for (auto& batch : batches) {
///       adafactor.zero_grad();
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       adafactor.step();
///     }
///
/// Adaptive Learning Rates with Sublinear Memory Cost, Shazeer and Stern, 2018. Its variants:
///
/// - torch.optim.Adafactor: `variant(AdafactorVariant::pytorch).eps({e, 1e-3})`, where e is the dtype's machine epsilon
///   (its default, None): 2.2e-16 for float64, 1.2e-7 for float32, 0.0078 for bfloat16.
/// - transformers.Adafactor: the defaults; given an lr, `relative_step(false).lr(lr)`. Its clip_threshold is `d`, its
///   decay_rate `beta2_decay`.
/// - The paper: the defaults. Its momentum is `beta1`, its slow start `warmup_init(true)`.
///
/// A tensor of three or more dimensions has a separate state for each matrix of the last two. Parameters: float32,
/// float64, bfloat16 and float16 (with float32 state), with any strides. Gradients: dense. Throws, before anything has
/// changed, for complex parameters, a parameter that is listed twice, or state of another shape.
///
/// @note Does not synchronize. Uses threads and instructions like `AdamW`. On a device it needs this library's CUDA
/// kernels, which `gradaccum::compiled` has with CMake's `GRADACCUM_CUDA`, and takes three or five launches for up to
/// 320 tensors; otherwise its step throws before anything has changed.
/// @note Memory: the state. A step adds a column and up to 16 rows per matrix, and copies of tensors that are not
/// row-major, about 16 MB at a time or one tensor's. Device kernels instead add a column per 256 columns and a row per
/// 64 rows, or fewer, of 320 tensors at a time.
class Adafactor : public OwnOptimizer<Adafactor, AdafactorOptions, AdafactorParamState> {
 public:
  static constexpr const char* name = "Adafactor";

  using OwnOptimizer<Adafactor, AdafactorOptions, AdafactorParamState>::OwnOptimizer;

  static void check(const AdafactorOptions& options) { options.check(); }
  bool steps_by_elements() const override { return false; }  // means run over rows, columns and whole tensors

 private:
  /// Prepares the state, and returns the step.
  static detail::AdafactorStep next_step(const AdafactorOptions& options, const at::Tensor& parameter,
                                         const at::Tensor& gradient, AdafactorParamState& state);
  GRADACCUM_INLINE detail::PreparedStep prepare_steps(const detail::GradientOf& gradient_of,
                                                      const detail::Multiplier& multiplier) override;
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/adafactor.ipp>
#endif
