// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/optimizers/one_pass_optimizer.hpp>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

namespace gradaccum::detail {

/// An optimizer that LibTorch lacks. `Derived` has `name` and `static void check(const Options&)`, and overrides
/// `move`.
template <class Derived, class Options, class State>
class OwnOptimizer : public OnePassOptimizer<Derived, torch::optim::Optimizer, State> {
 public:
  explicit OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {});
  explicit OwnOptimizer(std::vector<at::Tensor> parameters, Options defaults = {});
  OwnOptimizer(OwnOptimizer&&) = default;
  OwnOptimizer& operator=(OwnOptimizer&&) = default;
  GRADACCUM_INLINE ~OwnOptimizer() override;

  /// Adds a group and keeps all its options. LibTorch's function replaces options of a type that it does not know.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  GRADACCUM_INLINE void save(torch::serialize::OutputArchive& archive) const override;
  GRADACCUM_INLINE void load(torch::serialize::InputArchive& archive) override;

 protected:
  static const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }
  /// Returns a copy of the parameter's state, or a new state.
  State state_of(const at::Tensor& parameter) const;
  /// Stores the states of parameters whose steps have been taken.
  void keep(std::vector<std::pair<at::Tensor, State>> states);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/own_optimizer.ipp>
#endif
