// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/samples_of.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>

namespace gradaccum::detail {

/// `Float [64, 784] #1b2c3d4e`: dtype, shape, and the checksum of the numbers.
std::string fingerprint_of(const at::Tensor& tensor);

template <class T>
concept has_target = requires(const T& value) {
  value.target;
};

/// A text that tells batches apart by the tensors in them; empty for a type in which none are found.
///
/// @note Reads all of the batch, and brings it to the CPU.
template <class T>
std::string fingerprint_of(const T& value) {
  if constexpr (std::derived_from<T, at::Tensor>) {
    return fingerprint_of(static_cast<const at::Tensor&>(value));
  } else if constexpr (maps_names<T>) {
    std::string all;
    for (auto& [name, tensor] : value) all += fingerprint_of(tensor) + "; ";
    return all;
  } else if constexpr (std::ranges::forward_range<const T> && !is_text<T>) {
    std::string all;
    for (auto& element : value) all += fingerprint_of(element) + "; ";
    return all;
  } else if constexpr (has_data<T>) {
    auto data = fingerprint_of(value.data);
    if constexpr (has_target<T>) return data + ", " + fingerprint_of(value.target);
    return data;
  } else if constexpr (is_tuple<T>) {
    return std::apply([](auto&... each) { return ((fingerprint_of(each) + "; ") + ... + std::string()); }, value);
  } else {
    return "";
  }
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/fingerprint.ipp>
#endif
