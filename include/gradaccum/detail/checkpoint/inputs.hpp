// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <optional>
#include <ranges>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

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

/// Calls `use(at::Tensor&)` for each tensor in a value, looking into optionals, pairs, tuples and containers. Other
/// values stay as they are.
template <class Value, class Use>
void for_each_tensor(Value& value, Use& use) {
  if constexpr (std::is_const_v<Value>) {
    // skips a map's keys
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

/// Copies an input for later use. If it only refers to the caller's memory, copies that memory.
template <class Input>
std::decay_t<const Input&> lasting_copy(const Input& input) {
  return input;
}
template <class T>
std::vector<T> lasting_copy(const c10::ArrayRef<T>& input) {
  return input.vec();
}
template <class T>
std::vector<std::remove_cv_t<T>> lasting_copy(const std::span<T>& input) {
  return {input.begin(), input.end()};
}
template <class Input>
using kept_t = decltype(lasting_copy(std::declval<const std::remove_reference_t<Input>&>()));

/// Keeps tensors as an autograd operation keeps those it saves: hooks around the checkpoint see them, outer checkpoints
/// drop them, and in-place changes are noticed.
class KeptTensors {
 public:
  KeptTensors();
  KeptTensors(const KeptTensors&) = delete;
  KeptTensors& operator=(const KeptTensors&) = delete;
  ~KeptTensors();

  /// Moves a tensor in, which leaves its handle undefined.
  void keep(at::Tensor& tensor);
  at::Tensor bring_back(std::size_t i) const;

  /// Throws if the function, just run, changed an input in place, since it could not be recomputed.
  void check_unchanged();

 private:
  struct Kept;

  std::vector<Kept> kept_;
};

/// The arguments of a call, kept so that it can be repeated.
template <class... Inputs>
class CheckpointInputs {
  static_assert((std::is_copy_constructible_v<kept_t<Inputs>> && ...),
                "checkpoint: inputs must be copyable, since the function is called with them again");

 public:
  explicit CheckpointInputs(const std::remove_reference_t<Inputs>&... inputs) : values_(lasting_copy(inputs)...) {
    auto keep = [this](at::Tensor& tensor) { tensors_.keep(tensor); };
    for_each_tensor(values_, keep);
  }
  KeptTensors& tensors() { return tensors_; }

  /// Calls `function(inputs...)` with inputs of the original types and value categories.
  template <class Function>
  void call(Function& function) const {
    auto values = values_;
    std::size_t next = 0;
    auto bring_back = [&](at::Tensor& tensor) { tensor = tensors_.bring_back(next++); };
    for_each_tensor(values, bring_back);
    std::apply([&](auto&... value) { function(as<Inputs>(value)...); }, values);
  }

 private:
  template <class Input>
  static decltype(auto) as(kept_t<Input>& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<Input>, kept_t<Input>>) {
      return static_cast<Input&&>(value);
    } else {
      return (value);
    }
  }

  std::tuple<kept_t<Inputs>...> values_;
  KeptTensors tensors_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/inputs.ipp>
#endif
