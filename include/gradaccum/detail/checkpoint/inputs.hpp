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

/// A copy that lasts: of what only looks at memory of the caller's, that memory too.
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

/// Tensors are kept as an operation of autograd keeps what it saves: hooks around the checkpoint see them, checkpoints
/// around it forget them, and a change in place is noticed.
class KeptTensors {
 public:
  KeptTensors();
  KeptTensors(const KeptTensors&) = delete;
  KeptTensors& operator=(const KeptTensors&) = delete;
  ~KeptTensors();

  /// One more; the handle is taken.
  void keep(at::Tensor& tensor);
  at::Tensor bring_back(std::size_t i) const;

  /// The function, just done, has left its inputs as they were: it could not be repeated otherwise.
  void check_unchanged();

 private:
  struct Kept;

  std::vector<Kept> kept_;
};

/// The arguments of a call that will be made again.
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

  /// `function(inputs...)`, with inputs of the same kinds as before.
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
