// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_backward.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
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
    TORCH_CHECK(!computed_.gradients.empty(), "CompiledStep: backward runs once, unless .retain_graph is true");
    const auto seed = seeds[0].item<double>();
    next_->follow(seed);
    const bool kept = torch::autograd::get_current_graph_task_keep_graph();
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

using NodePointer = decltype(torch::autograd::Edge::function);  // whose kind depends on LibTorch's version

template <class Node, class... Arguments>
NodePointer new_node(Arguments&&... arguments) {
  if constexpr (std::same_as<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

GRADACCUM_INLINE void set_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                                    ComputedGradients computed, std::shared_ptr<SeedExponent> next) {
  const auto node = new_node<CompiledBackward>(std::move(computed), std::move(next));
  node->set_next_edges(torch::autograd::collect_next_edges(parameters));
  torch::autograd::set_history(loss, node);
}

}  // namespace gradaccum::detail
