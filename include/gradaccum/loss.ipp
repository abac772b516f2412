// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/loss.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/ops/full_like.h>
#include <c10/util/Exception.h>

namespace gradaccum {

GRADACCUM_INLINE Loss Loss::with(at::Tensor output_of_model, at::Tensor wanted) && {
  output = std::move(output_of_model);
  target = std::move(wanted);
  return std::move(*this);
}

GRADACCUM_INLINE Loss Loss::with(at::Tensor output_of_model, at::Tensor wanted) const& {
  return Loss(*this).with(std::move(output_of_model), std::move(wanted));
}

GRADACCUM_INLINE void Loss::check_shape() const {
  TORCH_CHECK(mean.defined() && mean.numel() == 1, "Loss: the mean must have one element, got ",
              mean.defined() ? c10::str("shape ", mean.sizes()) : "an undefined tensor");
}

GRADACCUM_INLINE void Loss::check() const {
  check_shape();
  TORCH_CHECK(items == 0 || mean.requires_grad(), "Loss: the mean requires no grad, so backward has nothing to do");
}

GRADACCUM_INLINE void Loss::backward(const BackwardOptions& options) const {
  check();
  const auto by = product_of(seed);
  const bool plain = !options.retain_graph.value_or(false) && !options.create_graph && options.inputs.empty();
  if (ready && plain && by.on_host() && ready->add(mean, by.host())) return;
  at::Tensor start;
  if (by.on_host() && !by.is_one()) start = at::full_like(mean, by.host());
  if (!by.on_host()) start = by.on(mean.device()).to(mean.scalar_type()).expand_as(mean);
  const auto inputs = options.inputs.empty() ? std::nullopt : std::optional<at::TensorList>(options.inputs);
  mean.backward(start, options.retain_graph, options.create_graph, inputs);
}

}  // namespace gradaccum
