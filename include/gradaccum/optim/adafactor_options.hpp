// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/state/named_state.hpp>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gradaccum::optim {

/// The differences between implementations of Adafactor.
///
/// `paper`, as in transformers: eps1 is added to the squared gradient; weight decay subtracts a share of the parameter,
/// `weight_decay * step size`. `pytorch`: the mean of row_var is at least eps1, the estimate at least eps1^2; weight
/// decay subtracts `weight_decay * lr`.
enum class AdafactorVariant { paper, pytorch };

/// The options of `Adafactor`: step sizes, decays and the variant.
struct AdafactorOptions : public torch::optim::OptimizerCloneableOptions<AdafactorOptions>,
                          public detail::ArchivesItself {
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
  GRADACCUM_INLINE void serialize(torch::serialize::InputArchive& archive) override;
  GRADACCUM_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void state(Archive& archive) override;
  friend bool operator==(const AdafactorOptions& a, const AdafactorOptions& b);
  void check() const;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// The state of a parameter: row_var and col_var for a matrix, or for the matrices of its last two dimensions; variance
/// for a tensor of fewer dimensions.
struct AdafactorParamState : public detail::OwnParamState {
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

}  // namespace gradaccum::optim

#ifndef GRADACCUM_COMPILED
#include <gradaccum/optim/adafactor_options.ipp>
#endif
