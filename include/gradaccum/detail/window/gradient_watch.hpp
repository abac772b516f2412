// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/snapshot.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

namespace gradaccum::detail {

/// Notices what has become of gradients since it looked last: cleared, replaced, or written to by somebody.
class GradientWatch {
 public:
  /// Takes notice of the gradients as they are.
  void look(const std::vector<at::Tensor>& parameters) { seen_ = Snapshot(gradients_of(parameters)); }

  /// The list of parameters has changed. One that is new has not been seen with a gradient.
  void follow(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after) {
    std::vector<std::size_t> from;
    for (auto& parameter : after)
      from.push_back(std::find_if(before.begin(), before.end(), [&](auto& b) { return b.is_same(parameter); }) -
                     before.begin());
    seen_ = seen_.rearranged(from);
  }

  /// Somebody else's backward, or anything else, has written to a gradient.
  bool touched(const std::vector<at::Tensor>& parameters) const {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (touched(i, parameters[i].grad())) return true;
    return false;
  }

  void check_kept(const std::vector<at::Tensor>& parameters) const;
  void check_only_ours(const std::vector<at::Tensor>& parameters, bool window_is_empty) const;

 private:
  bool touched(std::size_t i, const at::Tensor& gradient) const {
    return gradient.defined() && !seen_.untouched(i, gradient);
  }
  static std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
    std::vector<at::Tensor> gradients;
    gradients.reserve(parameters.size());
    for (auto& parameter : parameters) gradients.push_back(parameter.grad());
    return gradients;
  }

  Snapshot seen_;
};

/// Backward continues a sum in place; in a new tensor if it records a graph, or if a dense part joins a sparse one.
inline void GradientWatch::check_kept(const std::vector<at::Tensor>& parameters) const {
  const bool graph = std::any_of(parameters.begin(), parameters.end(),
                                 [](auto& p) { return p.grad().defined() && p.grad().requires_grad(); });
  for (std::size_t i = 0; i < parameters.size(); ++i)
    TORCH_CHECK(!seen_.gone(i, parameters[i].grad()) && (graph || !seen_.replaced(i, parameters[i].grad())),
                "GradAccumulator: the gradient of parameter ", i, " (shape ", parameters[i].sizes(),
                ") vanished inside a window; call optimizer.zero_grad(), which waits for the window's end, in place of "
                "model->zero_grad()");
}

/// In the weighted form every part of a sum has come by `backward`. What was there before the window does not matter.
inline void GradientWatch::check_only_ours(const std::vector<at::Tensor>& parameters, bool window_is_empty) const {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    TORCH_CHECK(!touched(i, parameters[i].grad()) || (window_is_empty && seen_.had(i)),
                "GradAccumulator: the gradient of parameter ", i, " (shape ", parameters[i].sizes(),
                ") changed outside optimizer.backward(loss); one window must not mix it with loss.backward(), and code "
                "that changes gradients goes inside `if (optimizer.ready()) { optimizer.gradients().apply(); … }`");
}

}  // namespace gradaccum::detail
