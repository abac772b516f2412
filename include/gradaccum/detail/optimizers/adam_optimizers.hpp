// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/own_optimizer.hpp>

#include <c10/util/Exception.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

/// Adam and AdamW share these parts, with float and with 8-bit moments.
namespace gradaccum::optim {

/// Returns the settings of Adam's next step, or of AdamW's, whose options say that the weight decay is decoupled.
template <class Optimizer, class Options>
detail::AdamStep adam_step(const Options& options, std::int64_t steps) {
  constexpr bool decoupled = std::is_same_v<Options, torch::optim::AdamWOptions>;
  TORCH_CHECK(steps >= 0, Optimizer::name, ": the step count must be >= 0, got ", steps);
  const auto [beta1, beta2] = options.betas();
  return {options.lr(), beta1, beta2, options.eps(), options.weight_decay(), options.amsgrad(), decoupled, steps + 1};
}

/// With the options and state of LibTorch's class.
template <class Derived, class Base, class Options, class State>
class AdamOptimizer : public ElementOptimizer<Derived, Base, Options, State> {
 public:
  using ElementOptimizer<Derived, Base, Options, State>::ElementOptimizer;

  static detail::AdamStep next_step(const Options& options, const State& state) {
    return adam_step<Derived>(options, state.step());
  }
};

/// The moments of one parameter: 8-bit codes with their scales, or float tensors if the parameter is small.
class Adam8bitParamState : public OwnParamState {
 public:
  GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> tensors() override;
  GRADACCUM_INLINE void check(const at::Tensor& parameter) const override;
  bool coded() const { return exp_avg.defined() && exp_avg.scalar_type() == at::kByte; }
  detail::StateParts parts() { return {{&exp_avg, &exp_avg_sq, &exp_avg_scale, &exp_avg_sq_scale}, &step()}; }
  /// Restores the memory order of codes from a file. Files are row-major, but scales belong to blocks in memory order.
  void restore_order();

  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  at::Tensor order;  ///< the codes' dimensions by descending stride; undefined if they are row-major
};

/// The base of Adam8bit and AdamW8bit, which differ only in how they apply the weight decay.
template <class Derived, class Options>
class Adam8bitOptimizer
    : public ElementOptimizer<Derived, OwnGroups<Derived, Options, Adam8bitParamState>, Options, Adam8bitParamState> {
 public:
  using ElementOptimizer<Derived, OwnGroups<Derived, Options, Adam8bitParamState>, Options,
                         Adam8bitParamState>::ElementOptimizer;

  static void check(const Options& options);

  detail::AnyStep next_step(const Options& options, const Adam8bitParamState& state, const at::Tensor& parameter) const;

  /// Keeps the moments of these parameters, for example of an embedding, in 32 bits. Call it before their first step.
  void keep_in_32_bits(const std::vector<at::Tensor>& parameters);

 private:
  detail::PreparedStep prepare_steps(const detail::GradientOf& gradient_of,
                                     const detail::Multiplier& multiplier) override;
  /// Returns true for a parameter that was passed to `keep_in_32_bits`, and for a rank's piece of it if it is sharded.
  bool keeps_in_32_bits(const at::Tensor& parameter) const;

  std::vector<at::Tensor> in_32_bits_;  // set by the program, and not a part of the state
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
