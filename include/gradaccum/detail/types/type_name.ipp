// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/type_name.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Type.h>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string name_of_class(const std::type_info& type) {
  const auto name = c10::demangle(type.name());
  const auto end = name.find('<');
  const auto colon = name.rfind(':', end);
  return name.substr(colon == std::string::npos ? 0 : colon + 1);
}

}  // namespace gradaccum::detail
