// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Remembers tensors without keeping their memory, to tell later whether they are untouched, gone or replaced.
///
/// Weak references, not addresses: a new tensor is often made where the old one lay.
class Snapshot {
 public:
  Snapshot() = default;
  explicit Snapshot(const std::vector<at::Tensor>& tensors) {
    entries_.reserve(tensors.size());
    for (auto& tensor : tensors) entries_.emplace_back(tensor);
  }

  /// The same tensors as then, and nobody wrote to them (by LibTorch's version counters; no device is asked).
  bool untouched(const std::vector<at::Tensor>& tensors) const {
    if (tensors.size() != entries_.size()) return false;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (!entries_[i].untouched(tensors[i])) return false;
    return true;
  }
  bool untouched(std::size_t i, const at::Tensor& tensor) const {
    return i < entries_.size() && entries_[i].untouched(tensor);
  }

  bool had(std::size_t i) const { return i < entries_.size() && entries_[i].defined; }
  /// Tensor `i` was there, and now there is none.
  bool gone(std::size_t i, const at::Tensor& tensor) const { return had(i) && !tensor.defined(); }
  /// Tensor `i` was there, and now there is another, of the same layout.
  bool replaced(std::size_t i, const at::Tensor& tensor) const {
    return i < entries_.size() && entries_[i].replaced(tensor);
  }

  /// The same memory of tensors in a new order: the one at `i` was at `from[i]`; beyond the end: not there before.
  Snapshot rearranged(const std::vector<std::size_t>& from) const {
    Snapshot result;
    for (auto i : from) result.entries_.push_back(i < entries_.size() ? entries_[i] : Entry(at::Tensor()));
    return result;
  }

 private:
  struct Entry {
    using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

    explicit Entry(const at::Tensor& tensor) : impl(tensor.getIntrusivePtr()) {
      if (!tensor.defined()) return;
      defined = true;
      layout = tensor.layout();
      version = version_of(tensor);
    }
    bool same(const at::Tensor& tensor) const { return impl.lock().get() == tensor.unsafeGetTensorImpl(); }
    bool untouched(const at::Tensor& tensor) const {
      return tensor.defined() == defined && (!defined || (same(tensor) && version_of(tensor) == version));
    }
    bool replaced(const at::Tensor& tensor) const {
      return defined && tensor.defined() && !same(tensor) && tensor.layout() == layout;
    }
    static std::uint32_t version_of(const at::Tensor& t) { return t.is_inference() ? 0 : t._version(); }

    Weak impl;
    bool defined = false;
    at::Layout layout = at::kStrided;
    std::uint32_t version = 0;
  };

  std::vector<Entry> entries_;
};

}  // namespace gradaccum::detail
