// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <string_view>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::optim {

/// Several optimizers as one, for a model whose parameters need different ones.
///
///     std::vector<at::Tensor> matrices, others;
///     for (auto& p : model->parameters()) (p.dim() == 2 ? matrices : others).push_back(p);
///     ga::optim::Muon muon(matrices, ga::optim::MuonOptions(0.02));
///     ga::optim::AdamW adamw(others, ga::optim::AdamWOptions(1e-3));
///     ga::optim::MultiOptimizer both(muon, adamw);
///     ga::GradAccumulator optimizer(both, {.steps = 4});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.clip_grad_norm_(1.0);                  // one norm over all parameters
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// A window, its factor, its norm and a loss scaler's decision are common: all optimizers step, or none.
///
/// Members. Any of `ga::optim`, LibTorch's except LBFGS, and classes derived from these; they must outlive this object.
/// With one that does not take gradients, as LibTorch's, all gradients are multiplied in memory first, and
/// `in_backward` is not supported. Throws if a parameter is in two of them. `ga::OptimizerState` saves each under its
/// name.
///
/// Exceptions. Optimizers of `ga::optim` check their gradients before any steps; others step first. So if one throws,
/// none of `ga::optim` has stepped.
///
/// Rates. `ga::LearningRates rates(both)` sets all in proportion, `ga::LearningRates rates(muon)` Muon's alone.
///
/// @note Does not synchronize, except for a 4-byte read with a loss scaler, as its members do.
class MultiOptimizer final : public TakesGradients {
 public:
  /// Takes optimizers of different classes, which are their names, such as AdamW.
  template <std::derived_from<torch::optim::Optimizer>... Optimizers>
  requires(sizeof...(Optimizers) > 0) explicit MultiOptimizer(Optimizers&... optimizers)
      : MultiOptimizer(std::vector<NamedOptimizer>{{detail::type_name(optimizers), optimizers}...}) {}
  /// Takes optimizers with names: `MultiOptimizer({{"actor", adam_of_actor}, {"critic", adam_of_critic}})`.
  explicit MultiOptimizer(std::vector<NamedOptimizer> optimizers);
  MultiOptimizer(const MultiOptimizer&) = delete;

  /// Steps with the parameters' own gradients.
  void step();
  GRADACCUM_INLINE void step(Gradients gradients) override;
  GRADACCUM_INLINE std::function<void()> prepare(Gradients gradients) override;
  GRADACCUM_INLINE bool judges_on_device(const Gradients& gradients) const override;
  /// Returns true if no member is LibTorch's own.
  bool all_take_gradients() const;

  void zero_grad(bool set_to_none = true);

  /// Returns the groups of all members: one member after another, then groups that were added later.
  std::vector<ParamGroupRef> param_groups() const;
  const std::vector<NamedOptimizer>& members() const { return members_; }
  torch::optim::Optimizer& operator[](std::string_view name) const;

  /// Throws if a parameter of the model is in no optimizer and not frozen. A Trainer calls it.
  void check(const torch::nn::Module& model) const;

 private:
  void check_distinct();

  /// A group of a member.
  struct Group {
    std::size_t member, index;
  };

  std::vector<NamedOptimizer> members_;
  mutable std::vector<Group> order_;               // of the groups, which later ones do not change
  mutable std::vector<std::size_t> known_groups_;  // of each member
  std::vector<const void*> distinct_;              // the parameters, which were checked to be in one optimizer each
};

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/multi_optimizer.ipp>
#endif
