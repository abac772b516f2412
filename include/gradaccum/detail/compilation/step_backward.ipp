// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_backward.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>
#include <concepts>
#include <memory>
#include <string>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void SeedExponent::follow(double seed) {
  if (!std::isfinite(seed) || seed == 0) return;
  static_cast<void>(std::frexp(seed, &value));
  --value;
}

/// The only operation of a compiled step that autograd sees.
class CompiledBackward final : public torch::autograd::Node {
 public:
  CompiledBackward(ComputedGradients computed, std::shared_ptr<SeedExponent> next)
      : computed_(std::move(computed)), next_(std::move(next)) {}

  std::string name() const override { return "CompiledBackward"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& seeds) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "CompiledStep: create_graph must be false: a compiled step has no gradients of gradients");
    return gradients(seeds[0].item<double>(), torch::autograd::get_current_graph_task_keep_graph());
  }

  std::vector<at::Tensor> gradients(double seed, bool kept) {
    TORCH_CHECK(!computed_.gradients.empty(), "CompiledStep: backward runs once, unless .retain_graph is true");
    next_->follow(seed);
    return times(seed, kept ? computed_.gradients : std::exchange(computed_.gradients, {}), kept);
  }

  void release_variables() override {
    computed_.gradients.clear();
    computed_.again = nullptr;
  }

 private:
  std::vector<at::Tensor> times(double seed, std::vector<at::Tensor> gradients, bool kept) const {
    auto exponent = computed_.exponent;
    if (computed_.again && next_->value != exponent) {
      gradients = computed_.again(exponent = next_->value);
      kept = false;
    }
    const auto rest = seed / std::exp2(exponent);
    if (rest == 1) return gradients;
    for (auto& gradient : gradients) gradient = kept ? gradient.mul(rest) : gradient.mul_(rest);
    return gradients;
  }

  ComputedGradients computed_;
  std::shared_ptr<SeedExponent> next_;
};

using NodePointer = decltype(torch::autograd::Edge::function);  // the kind of pointer depends on LibTorch's version

template <class Node, class... Arguments>
NodePointer new_node(Arguments&&... arguments) {
  if constexpr (std::same_as<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

/// Returns the node that accumulates a parameter's gradient; null if it is another kind of node or has hooks.
GRADACCUM_INLINE torch::autograd::AccumulateGrad* unheard(const torch::autograd::Edge& edge) {
  auto* const node = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  const bool heard = !node || !node->pre_hooks().empty() || !node->post_hooks().empty() ||
                     !node->tensor_pre_hooks().empty() || node->tensor_post_acc_grad_hooks();
  return heard ? nullptr : node;
}

/// Adds gradients without autograd's engine, which takes as long as a small network.
class AddedGradients final : public ReadyGradients {
 public:
  explicit AddedGradients(NodePointer node) : node_(std::move(node)) {}

  bool add(const at::Tensor& loss, double seed) override {
    if (loss.grad_fn().get() != node_.get()) return false;
    std::vector<torch::autograd::AccumulateGrad*> parameters;
    for (auto& edge : node_->next_edges()) {
      parameters.push_back(unheard(edge));
      if (!parameters.back()) return false;
    }
    const at::NoGradGuard no_grad;
    auto gradients = static_cast<CompiledBackward&>(*node_).gradients(seed, /*kept=*/false);
    node_->release_variables();
    for (std::size_t i = 0; i < parameters.size(); ++i) add_to(parameters[i]->variable, std::move(gradients[i]));
    return true;
  }

 private:
  static void add_to(at::Tensor& parameter, at::Tensor gradient) {
    auto& sum = parameter.mutable_grad();
    torch::autograd::AccumulateGrad::accumulateGrad(parameter, sum, gradient, /*num_expected_refs=*/1,
                                                    [&sum](at::Tensor&& updated) { sum = std::move(updated); });
  }

  NodePointer node_;
};

GRADACCUM_INLINE std::shared_ptr<ReadyGradients> set_gradients(const at::Tensor& loss,
                                                               const std::vector<at::Tensor>& parameters,
                                                               ComputedGradients computed,
                                                               std::shared_ptr<SeedExponent> next) {
  const auto node = new_node<CompiledBackward>(std::move(computed), std::move(next));
  node->set_next_edges(torch::autograd::collect_next_edges(parameters));
  torch::autograd::set_history(loss, node);
  return std::make_shared<AddedGradients>(node);
}

}  // namespace gradaccum::detail
