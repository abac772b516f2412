// SPDX-License-Identifier: Apache-2.0
// Adds gradients that were computed with a loss, with or without autograd's engine.
#pragma once

#include <gradaccum/detail/window/fused_gradients.hpp>

#include <gradaccum/detail/window/grad_ready_hooks.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// The operation that autograd sees of a loss without a graph.
class FusedBackward final : public torch::autograd::Node {
 public:
  explicit FusedBackward(FusedGradients::OfSeed of_seed) : of_seed_(std::move(of_seed)) {}

  std::string name() const override { return "FusedBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& seeds) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "Loss: create_graph must be false: gradients of with_gradients() have no double backward");
    return of_seed_(seeds[0].reshape({}).to(at::kDouble));
  }

 private:
  FusedGradients::OfSeed of_seed_;
};

GRADACCUM_INLINE FusedGradients::FusedGradients(const at::Tensor& mean, std::vector<at::Tensor> parameters,
                                                OfSeed of_seed)
    : parameters_(std::move(parameters)), of_seed_(std::move(of_seed)), mean_(mean) {
  TORCH_CHECK(of_seed_, "Loss: with_gradients() must get a function, got an empty one");
  for (auto& parameter : parameters_)
    TORCH_CHECK(parameter.defined() && parameter.is_leaf(),
                "Loss: with_gradients() must get parameters, which are leaves of the graph, got ",
                parameter.defined() ? "the result of an operation" : "an undefined tensor");
  if (!mean.requires_grad()) {
    const auto node = new_node<FusedBackward>(of_seed_);
    node->set_next_edges(torch::autograd::collect_next_edges(parameters_));
    mean_ = mean.detach().clone();  // another tensor, since the caller's must not change
    torch::autograd::set_history(mean_, node);
  }
  node_ = mean_.grad_fn().get();
}

/// Stores a first gradient, or adds one whose layout differs from the sum's. Copies it if the caller has kept it.
GRADACCUM_INLINE void accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  auto& sum = parameter.mutable_grad();
  torch::autograd::AccumulateGrad::accumulateGrad(parameter, sum, gradient, /*num_expected_refs=*/1,
                                                  [&sum](at::Tensor&& updated) { sum = std::move(updated); });
}

/// Adds gradients without autograd's engine, whose overhead is as large as a small network's pass. Adds to all sums in
/// one call, which takes few kernels on a device.
GRADACCUM_INLINE void add_in_one_pass(const std::vector<at::Tensor>& parameters, std::vector<at::Tensor> gradients) {
  std::vector<at::Tensor> sums, added, first;
  std::vector<const at::Tensor*> of_first;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& sum = parameters[i].grad();
    const bool has_sum = sum.defined() && sum.layout() == at::kStrided && gradients[i].layout() == at::kStrided;
    if (has_sum) sums.push_back(sum);
    if (!has_sum) of_first.push_back(&parameters[i]);
    (has_sum ? added : first).push_back(std::move(gradients[i]));
  }
  const bool kept = std::ranges::any_of(first, [](auto& gradient) { return gradient.use_count() > 1; });
  if (kept) first = at::_foreach_mul(first, 1);  // before a sum changes: it may throw
  if (!sums.empty()) at::_foreach_add_(sums, added);
  for (std::size_t i = 0; i < first.size(); ++i) accumulate(*of_first[i], std::move(first[i]));
  for (auto& parameter : parameters) say_added(parameter);
}

GRADACCUM_INLINE bool FusedGradients::add_to_parameters(const at::Tensor& mean, const Multiplier& seed) const {
  const auto is_trained = [](auto& parameter) { return parameter.requires_grad(); };
  const bool is_this_one = mean.is_same(mean_) && mean.grad_fn().get() == node_;
  if (!is_this_one || !torch::autograd::impl::hooks(mean).empty()) return false;
  if (!std::ranges::any_of(parameters_, is_trained)) return false;
  for (auto& parameter : parameters_)
    if (is_trained(parameter) && !has_no_hooks(parameter)) return false;
  const at::NoGradGuard no_grad;
  auto gradients = of_seed_(seed.on_host() ? at::scalar_tensor(seed.host(), at::kDouble) : seed.on(mean.device()));
  if (gradients.empty()) return false;
  TORCH_CHECK(gradients.size() == parameters_.size(),
              "Loss: the function of with_gradients() must return one gradient ", "for each of the ",
              parameters_.size(), " parameters, got ", gradients.size());
  std::vector<at::Tensor> of, found;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !is_trained(parameters_[i])) continue;
    TORCH_CHECK(gradients[i].sizes() == parameters_[i].sizes(), "Loss: gradient ", i, " of with_gradients() must have ",
                "the parameter's shape ", parameters_[i].sizes(), ", got ", gradients[i].sizes());
    of.push_back(parameters_[i]);
    found.push_back(std::move(gradients[i]));
  }
  add_in_one_pass(of, std::move(found));
  return true;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
