// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/optimizers/one_pass.hpp>
#include <gradaccum/gradients.hpp>

#include <torch/optim/sgd.h>

namespace gradaccum::optim {

/// LibTorch's options, so files of them are interchangeable.
using SGDOptions = torch::optim::SGDOptions;

/// torch::optim::SGD in one pass over memory, which also applies a window's deferred factor.
///
///     ga::optim::SGD sgd(model->parameters(), ga::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
///     torch::mse_loss(model->forward(x), y).backward();
///     sgd.step();
///     sgd.zero_grad();
///
/// Options, groups, state and files are the same as for torch::optim::SGD. Otherwise like `AdamW`, except that sparse
/// gradients on a device need no dense copy without momentum, weight decay and stochastic rounding.
///
/// @note Does not synchronize.
class SGD : public ElementOptimizer<SGD, torch::optim::SGD, SGDOptions, torch::optim::SGDParamState> {
 public:
  static constexpr const char* name = "SGD";

  using ElementOptimizer::ElementOptimizer;  // takes parameters or groups of them, and options

  /// Returns false if dampening applies to a first momentum, which is undampened: the host must know if it exists.
  bool judges_on_device(const Gradients& gradients) const override {
    if (!ElementOptimizer::judges_on_device(gradients)) return false;
    const detail::GradientOf gradient_of(gradients);
    for (auto& group : param_groups()) {
      const auto& options = static_cast<const SGDOptions&>(group.options());
      if (options.momentum() == 0 || options.dampening() == 0) continue;
      for (auto& parameter : group.params()) {
        const auto* const known = known_state(parameter);
        const bool is_first = !known || !known->momentum_buffer().defined();
        if (is_first && gradient_of(parameter).defined()) return false;
      }
    }
    return true;
  }

 private:
  friend ElementOptimizer;
  static detail::SgdStep next_step(const SGDOptions& options, const torch::optim::SGDParamState& state) {
    return {options.lr(),           options.momentum(), options.dampening(),
            options.weight_decay(), options.nesterov(), /*first=*/!state.momentum_buffer().defined()};
  }
};

}  // namespace gradaccum::optim
