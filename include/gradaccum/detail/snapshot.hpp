// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradaccum::detail {

/// Remembers tensors without keeping their memory, to tell later whether they are untouched, or gone.
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

  /// Tensor `i` was there, and now there is none, or one that does not continue it.
  bool lost(std::size_t i, const at::Tensor& tensor) const { return i < entries_.size() && entries_[i].lost(tensor); }

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
    bool lost(const at::Tensor& tensor) const {
      if (!defined || (tensor.defined() && same(tensor))) return false;
      // backward() continues a sum in a new tensor when it records a graph, or when a dense part joins a sparse one
      return !tensor.defined() || (!tensor.requires_grad() && tensor.layout() == layout);
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
