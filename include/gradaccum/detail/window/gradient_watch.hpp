// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Returns true if both lists hold the same tensors, not merely equal ones, in the same order.
bool same_parameters(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// A record of a tensor, possibly undefined, that does not keep its memory.
///
/// It holds a weak reference, not an address, since a new tensor is often made where the old one lay.
class SeenTensor {
 public:
  explicit SeenTensor(const at::Tensor& tensor);

  bool defined() const { return defined_; }
  /// Returns true for the recorded tensor if nothing has written to it (by its version counter, without a device).
  bool untouched(const at::Tensor& tensor) const;
  /// Returns true if another tensor of the same layout has taken the place of the recorded one.
  bool replaced(const at::Tensor& tensor) const;
  /// Returns true for the recorded tensor, even if it was written to.
  bool same(const at::Tensor& tensor) const;
  /// Returns true for the recorded tensor if it was written to once since, as by a backward that adds to it.
  bool added_to(const at::Tensor& tensor) const;
  /// Returns true for the recorded tensor if it has a version counter of its own: parts of one gradient share one.
  bool counts_alone(const at::Tensor& tensor) const;

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
  bool defined_ = false;
  at::Layout layout_ = at::kStrided;
  std::uint32_t version_ = 0;
};

inline constexpr const char* not_cleared =
    "GradAccumulator: the gradients of the last window are still there (or were cleared by .data(), which nobody can "
    "see), and backward adds to them; call optimizer.zero_grad() after every step(), which leaves an open window alone";

/// Detects gradients that were cleared, replaced or written to since it looked last.
class GradientWatch {
 public:
  /// Records the gradients as they are.
  void look(const std::vector<at::Tensor>& parameters);
  /// Follows a change of the list of parameters. A new one counts as seen without a gradient.
  void follow(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);
  /// Returns true if another backward, or anything else, has written to a gradient.
  bool touched(const std::vector<at::Tensor>& parameters) const;

  void check_kept(const std::vector<at::Tensor>& parameters) const;
  void check_cleared(const std::vector<at::Tensor>& parameters) const;
  void check_only_ours(const std::vector<at::Tensor>& parameters, bool window_is_empty) const;

 private:
  bool touched(std::size_t i, const at::Tensor& gradient) const {
    return gradient.defined() && !seen_[i].untouched(gradient);
  }

  std::vector<SeenTensor> seen_;  // the gradient of each parameter
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/gradient_watch.ipp>
#endif
