// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// The same tensors, not only equal ones, in the same order.
bool same_parameters(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// A tensor as it was seen, or that there was none; without keeping its memory.
///
/// A weak reference, not an address: a new tensor is often made where the old one lay.
class SeenTensor {
 public:
  explicit SeenTensor(const at::Tensor& tensor);

  bool defined() const { return defined_; }
  /// The same tensor as then, and nobody wrote to it (by LibTorch's version counters; no device is asked).
  bool untouched(const at::Tensor& tensor) const;
  /// There was one, and now there is another, of the same layout.
  bool replaced(const at::Tensor& tensor) const;
  /// The same tensor as then, whoever wrote to it.
  bool same(const at::Tensor& tensor) const;
  /// The same tensor as then, and written to once since, as backward does that adds to it.
  bool added_to(const at::Tensor& tensor) const;
  /// The same tensor as then, which alone has its counter: parts of one gradient count together.
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

/// Notices what has become of gradients since it looked last: cleared, replaced, or written to by somebody.
class GradientWatch {
 public:
  /// Takes notice of the gradients as they are.
  void look(const std::vector<at::Tensor>& parameters);
  /// The list of parameters has changed. One that is new has not been seen with a gradient.
  void follow(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after);
  /// Somebody else's backward, or anything else, has written to a gradient.
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
