// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <concepts>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A shared_ptr or an intrusive_ptr: LibTorch 2.15 has changed the type.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Node, class... Arguments>
NodePointer new_node(Arguments&&... arguments) {
  if constexpr (std::same_as<NodePointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

/// Gradients that are computed with a loss: the argument of `Loss::with_gradients`.
class FusedGradients {
 public:
  using OfSeed = std::function<std::vector<at::Tensor>(const at::Tensor& seed)>;

  FusedGradients(const at::Tensor& mean, std::vector<at::Tensor> parameters, OfSeed of_seed);

  /// The mean as a tensor whose backward computes these gradients. A mean that has a graph keeps it.
  const at::Tensor& attached_mean() const { return mean_; }

  /// Adds the gradients to the parameters'. Returns false if autograd's engine must do that: another mean has replaced
  /// this one, hooks expect the gradients, or there are none for this seed.
  bool add_to_parameters(const at::Tensor& mean, const Multiplier& seed) const;

 private:
  std::vector<at::Tensor> parameters_;
  OfSeed of_seed_;
  at::Tensor mean_;
  const void* node_ = nullptr;  // of the mean, which an operation in place exchanges
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/fused_gradients.ipp>
#endif
