// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/optim/optimizer.hpp>

#include <c10/util/Exception.h>

#include <tuple>

namespace gradaccum::optim {

/// The options of `Lion`.
struct LionOptions : OwnOptions<LionOptions> {
  LionOptions(double lr = 1e-4) : lr_(lr) {}
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);                    ///< the size of each element's step
  TORCH_ARG(betas_t, betas) = {0.9, 0.99};  ///< for the direction of a step, and for the moving average
  TORCH_ARG(double, weight_decay) = 0.0;    ///< decoupled from the gradient, as in AdamW

 public:
  static auto all(auto& of) {
    return std::tuple(named("lr", of.lr_), named("beta", of.betas_), named("weight_decay", of.weight_decay_));
  }
  void check() const {
    const auto [beta1, beta2] = betas();
    TORCH_CHECK(lr() >= 0, "Lion: lr must be >= 0, got ", lr());
    TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "Lion: betas must be in [0, 1), got ", beta1,
                " and ", beta2);
    TORCH_CHECK(weight_decay() >= 0, "Lion: weight_decay must be >= 0, got ", weight_decay());
  }
};

/// Lion: steps of equal size for all elements, with half of AdamW's state: 4 bytes per parameter.
///
///     ga::optim::Lion lion(model->parameters(), ga::optim::LionOptions(1e-4).weight_decay(1.0));
///     torch::mse_loss(model->forward(x), y).backward();
///     lion.step();
///     lion.zero_grad();
///
/// Symbolic Discovery of Optimization Algorithms, Chen et al., 2023. A step subtracts lr times the sign of
/// `beta1 exp_avg + (1 - beta1) gradient`, and then updates exp_avg with beta2. Its authors use a rate of a third to a
/// tenth of AdamW's, and a weight decay that is larger by as much. NaN in a gradient makes the parameter NaN.
///
/// Parameters, gradients and errors are as in `AdamW`.
///
/// @note Does not synchronize. Uses threads and instructions like `AdamW`; on a device without this library's kernels,
/// ATen's operations and memory for intermediate results.
class Lion : public ElementwiseOptimizer<Lion, LionOptions, LionStep> {
 public:
  static constexpr const char* name = "Lion";

  using ElementwiseOptimizer::ElementwiseOptimizer;  // takes parameters or groups of them, and options

 private:
  friend ElementOptimizer;
  static LionStep next_step(const LionOptions& options) {
    const auto [beta1, beta2] = options.betas();
    return {options.lr(), beta1, beta2, options.weight_decay()};
  }
};

}  // namespace gradaccum::optim
