// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/gradient_watch.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE bool same_parameters(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) { return x.is_same(y); });
}

GRADACCUM_INLINE std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

GRADACCUM_INLINE SeenTensor::SeenTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {
  if (!tensor.defined()) return;
  defined_ = true;
  layout_ = tensor.layout();
  version_ = version_of(tensor);
}

GRADACCUM_INLINE bool SeenTensor::same(const at::Tensor& tensor) const {
  // No other tensor has this address: a weak reference keeps the memory of its target from being used again.
  return tensor.defined() == defined_ && (!defined_ || impl_._unsafe_get_target() == tensor.unsafeGetTensorImpl());
}

GRADACCUM_INLINE bool SeenTensor::untouched(const at::Tensor& tensor) const {
  return same(tensor) && (!defined_ || version_of(tensor) == version_);
}

GRADACCUM_INLINE bool SeenTensor::added_to(const at::Tensor& tensor) const {
  return defined_ && same(tensor) && version_of(tensor) == version_ + 1;
}

GRADACCUM_INLINE bool SeenTensor::counts_alone(const at::Tensor& tensor) const {
  return defined_ && same(tensor) && tensor.unsafeGetTensorImpl()->unique_version();
}

GRADACCUM_INLINE bool SeenTensor::replaced(const at::Tensor& tensor) const {
  return defined_ && tensor.defined() && !same(tensor) && tensor.layout() == layout_;
}

GRADACCUM_INLINE void GradientWatch::look(const std::vector<at::Tensor>& parameters) {
  seen_.clear();
  seen_.reserve(parameters.size());
  for (auto& parameter : parameters) seen_.emplace_back(parameter.grad());
}

GRADACCUM_INLINE void GradientWatch::follow(const std::vector<at::Tensor>& before,
                                            const std::vector<at::Tensor>& after) {
  std::vector<SeenTensor> seen;
  for (auto& parameter : after) {
    const auto found = std::find_if(before.begin(), before.end(), [&](auto& b) { return b.is_same(parameter); });
    seen.push_back(found == before.end() ? SeenTensor({}) : seen_[static_cast<std::size_t>(found - before.begin())]);
  }
  seen_ = std::move(seen);
}

GRADACCUM_INLINE bool GradientWatch::touched(const std::vector<at::Tensor>& parameters) const {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (touched(i, parameters[i].grad())) return true;
  return false;
}

/// Throws if a sum has vanished. Backward continues a sum in place, or in a new tensor if it records a graph, or if a
/// dense part joins a sparse one.
GRADACCUM_INLINE void GradientWatch::check_kept(const std::vector<at::Tensor>& parameters) const {
  const bool graph = std::any_of(parameters.begin(), parameters.end(),
                                 [](auto& p) { return p.grad().defined() && p.grad().requires_grad(); });
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    const bool gone = seen_[i].defined() && !gradient.defined();
    TORCH_CHECK(!gone && (graph || !seen_[i].replaced(gradient)), "GradAccumulator: the gradient of parameter ", i,
                " (shape ", parameters[i].sizes(),
                ") vanished inside a window; call optimizer.zero_grad(), which waits for the window's end, in place of "
                "model->zero_grad()");
  }
}

/// Throws if the gradients of a closed window are still there: they would be a part of the next one.
GRADACCUM_INLINE void GradientWatch::check_cleared(const std::vector<at::Tensor>& parameters) const {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    TORCH_CHECK(!seen_[i].defined() || !seen_[i].untouched(parameters[i].grad()), not_cleared);
}

/// Throws if a part of a sum has not come by `backward`, as all do in the weighted form. What a gradient held before
/// the window does not matter.
GRADACCUM_INLINE void GradientWatch::check_only_ours(const std::vector<at::Tensor>& parameters,
                                                     bool window_is_empty) const {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!touched(i, parameters[i].grad())) continue;
    TORCH_CHECK(!window_is_empty || seen_[i].defined(), "GradAccumulator: parameter ", i, " (shape ",
                parameters[i].sizes(),
                ") has a gradient from before this window, which backward would add to; call optimizer.zero_grad() "
                "before the first optimizer.backward(loss)");
    TORCH_CHECK(
        window_is_empty, "GradAccumulator: the gradient of parameter ", i, " (shape ", parameters[i].sizes(),
        ") changed outside optimizer.backward(loss). By loss.backward()? One window has one form. By a backward "
        "for other parameters that came along here, as of a GAN's generator? Write "
        "optimizer.backward(loss, {.inputs = generator->parameters()}) there. By another accumulator of these "
        "parameters? They have one. By code that changes gradients? It goes inside `if (optimizer.ready()) { "
        "optimizer.gradients().apply(); … }`");
  }
}

}  // namespace gradaccum::detail
