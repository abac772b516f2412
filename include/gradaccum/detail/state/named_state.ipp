// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/named_state.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE NameOf::NameOf(const NamedParameters& parameters) {
  for (auto& item : parameters) names_.emplace(item.value().unsafeGetTensorImpl(), item.key());
}

GRADACCUM_INLINE const std::string& NameOf::operator()(const at::Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  TORCH_CHECK(found != names_.end(), "optimizer state: a parameter of shape ", parameter.sizes(),
              " has no name; pass the named_parameters() of the model that the optimizer steps");
  return found->second;
}

}  // namespace gradaccum::detail
