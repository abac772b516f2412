// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Type.h>

#include <string>
#include <typeinfo>

namespace gradaccum::detail {

/// The class of an object, behind a reference too, without namespaces: `SGD`.
template <class T>
std::string type_name(const T& object) {
  const auto name = c10::demangle(typeid(object).name());
  const auto end = name.find('<');
  const auto colon = name.rfind(':', end);
  return name.substr(colon == std::string::npos ? 0 : colon + 1);
}

}  // namespace gradaccum::detail
