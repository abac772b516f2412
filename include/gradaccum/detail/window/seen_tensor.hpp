// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace gradaccum::detail {

/// Returns true if both lists hold the same tensors, not merely equal ones, in the same order.
inline bool same_parameters(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](auto& x, auto& y) { return x.is_same(y); });
}

/// A record of a tensor, possibly undefined, that does not keep its memory. It holds a weak reference rather than an
/// address, since new tensors often reuse the address of a freed one.
class SeenTensor {
 public:
  explicit SeenTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()), defined_(tensor.defined()) {
    if (defined_) layout_ = tensor.layout(), version_ = version_of(tensor);
  }

  bool defined() const { return defined_; }
  /// Returns true for the recorded tensor, even if it was written to.
  bool same(const at::Tensor& tensor) const {
    // No other tensor has this address: a weak reference prevents its target's memory from being reused.
    return tensor.defined() == defined_ && (!defined_ || impl_._unsafe_get_target() == tensor.unsafeGetTensorImpl());
  }
  /// Returns true for the recorded tensor if its version counter shows no write since. Does not synchronize.
  bool untouched(const at::Tensor& tensor) const {
    return same(tensor) && (!defined_ || version_of(tensor) == version_);
  }
  /// Returns true if another tensor of the same layout has replaced the recorded one.
  bool replaced(const at::Tensor& tensor) const {
    return defined_ && tensor.defined() && !same(tensor) && tensor.layout() == layout_;
  }
  /// Returns true for the recorded tensor if it was written to exactly once since, as by a backward that adds to it.
  bool added_to(const at::Tensor& tensor) const {
    return defined_ && same(tensor) && version_of(tensor) == version_ + 1;
  }
  /// Returns true for the recorded tensor if it does not share its version counter, as parts of one gradient do.
  bool counts_alone(const at::Tensor& tensor) const {
    return defined_ && same(tensor) && tensor.unsafeGetTensorImpl()->unique_version();
  }

 private:
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
  bool defined_ = false;
  at::Layout layout_ = at::kStrided;
  std::uint32_t version_ = 0;
};

/// Returns a hash of a few bytes of a tensor's memory, which very likely shows a write to the tensor, even one that
/// bypasses LibTorch's version counters. Returns 0 if the host cannot read the memory without waiting.
inline std::uint64_t sample_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.numel() == 0)
    return 0;
  const auto* const bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  if (!bytes) return 0;
  const std::size_t all =
      tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : static_cast<std::size_t>(tensor.element_size());
  const std::size_t size = std::min(all, sizeof(std::uint64_t)), last = all - size;
  constexpr std::size_t most = 8;
  const std::size_t places = last == 0 ? 1 : most;
  std::uint64_t sample = 1, odd = 0x9E3779B97F4A7C15ULL;  // an odd factor keeps any change of one word
  for (std::size_t i = 0; i < places; ++i, odd += 2 * 0xBF58476D1CE4E5B9ULL) {
    std::uint64_t word = 0;
    const auto* const place = bytes + last * i / (most - 1);
    size == sizeof(word) ? std::memcpy(&word, place, sizeof(word)) : std::memcpy(&word, place, size);
    sample += word * odd;
  }
  return sample;
}

}  // namespace gradaccum::detail
