// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/fingerprint.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include <c10/util/StringUtil.h>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string fingerprint_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  auto text = c10::str(tensor.scalar_type(), " ", tensor.sizes());
  if (tensor.layout() != at::kStrided || tensor.numel() == 0) return text;
  const auto numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return c10::str(text, " #", crc32(numbers.const_data_ptr(), numbers.nbytes()));
}

}  // namespace gradaccum::detail
