// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

template <class T>
concept tuple_like = requires {
  typename std::tuple_size<T>::type;
};

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

template <class T>
concept container = std::ranges::forward_range<T> && std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>;

/// Calls `use(at::Tensor&)` for each tensor in a value: a tensor, and optionals, pairs, tuples and containers of such.
/// What else there is in it stays as it is.
template <class Value, class Use>
void for_each_tensor(Value& value, Use& use) {
  if constexpr (std::is_const_v<Value>) {
    // keys of a map
  } else if constexpr (std::derived_from<Value, at::Tensor>) {
    use(static_cast<at::Tensor&>(value));
  } else if constexpr (is_optional<Value>) {
    if (value) for_each_tensor(*value, use);
  } else if constexpr (tuple_like<Value>) {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, use), ...); }, value);
  } else if constexpr (container<Value>) {
    for (auto& part : value) for_each_tensor(part, use);
  }
}

}  // namespace gradaccum::detail
