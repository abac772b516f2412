// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <string>
#include <typeinfo>

namespace gradaccum::detail {

/// A class name without namespaces and template arguments: `SGD`.
std::string name_of_class(const std::type_info& type);

/// The dynamic class of an object.
template <class T>
std::string type_name(const T& object) {
  return name_of_class(typeid(object));
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/types/type_name.ipp>
#endif
