// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/samples_of.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>

namespace gradaccum::detail {

/// Describes a tensor by dtype, shape and a checksum of its values: `Float [64, 784] #1b2c3d4e`.
std::string fingerprint_of(const at::Tensor& tensor);

template <class T>
concept has_target = requires(const T& value) {
  value.target;
};

/// Appends the fingerprint of a value to `text`.
template <class T>
void add_fingerprint(std::string& text, const T& value) {
  [[maybe_unused]] const auto add_each = [&text](const auto& part) {
    add_fingerprint(text, part);
    text += "; ";
  };
  if constexpr (std::derived_from<T, at::Tensor>) {
    text += fingerprint_of(static_cast<const at::Tensor&>(value));
  } else if constexpr (maps_names<T>) {
    for (auto& [name, part] : value) add_each(part);
  } else if constexpr (std::ranges::forward_range<const T> && !is_text<T>) {
    for (auto& part : value) add_each(part);
  } else if constexpr (has_data<T>) {
    add_fingerprint(text, value.data);
    if constexpr (has_target<T>) add_fingerprint(text += ", ", value.target);
  } else if constexpr (is_tuple<T>) {
    std::apply([&](auto&... parts) { (add_each(parts), ...); }, value);
  }
}

/// A text that identifies a batch by its tensors; empty for a type without any.
///
/// @note Copies the batch to the CPU, and reads all of it.
template <class T>
std::string fingerprint_of(const T& value) {
  std::string text;
  add_fingerprint(text, value);
  return text;
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/fingerprint.ipp>
#endif
