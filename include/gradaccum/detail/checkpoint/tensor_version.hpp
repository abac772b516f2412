// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace gradaccum::detail {

/// Tells whether a tensor was changed in place since, without keeping its memory.
///
/// LibTorch makes this check for the tensors that it keeps itself, and leaves it out for those that hooks keep.
class TensorVersion {
 public:
  TensorVersion() = default;
  explicit TensorVersion(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_inference()) return;
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    version_ = counter_.current_version();
  }
  bool changed() const { return counter_.enabled() && counter_.current_version() != version_; }

 private:
  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  std::uint32_t version_ = 0;
};

}  // namespace gradaccum::detail
