// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace gradaccum {

/// Named values, saved and loaded by one function: `state(Archive&)`.
///
///     struct Counter {
///       std::int64_t count = 0;
///       void state(ga::Archive& archive) { archive("count", count); }
///     } counter{.count = 3}, other;
///     ga::Archive saved;
///     saved("counter", counter);                           // its values are named counter.count, …
///     ga::Archive(saved.values())("counter", other);       // other.count == 3
///
/// A value is a number, a flag, a text, a tensor, or a part that has `state(Archive&)`. Tensors are copied, both ways:
/// a loaded one is new. A name that is there twice, is missing, or has a value of another type or out of range throws;
/// what a part has loaded before that stays, so a part that must not be half-changed loads into locals first.
///
/// @note Does not synchronise with the device.
class Archive {
 public:
  using Value = std::variant<bool, std::int64_t, double, std::string, at::Tensor>;
  using Values = std::map<std::string, Value, std::less<>>;

  Archive() = default;                                                             ///< to save into
  explicit Archive(Values values) : values_(std::move(values)), loading_(true) {}  ///< to load from

  bool loading() const { return loading_; }
  const Values& values() const { return values_; }

  template <class T>
  void operator()(std::string_view name, T& value) {
    const auto full = prefix_ + std::string(name);
    TORCH_CHECK(used_.insert(full).second, "Archive: two values are named '", full, "'; give each part another name");
    if constexpr (requires { value.state(*this); })
      part(full, value);
    else if (loading_)
      load(full, value);
    else
      values_[full] = stored(value);
  }

  /// Throws if there are values that nobody has asked for: they belong to another program.
  void check_all_used() const {
    for (auto& [name, value] : values_)
      TORCH_CHECK(used_.contains(name), "Archive: nobody takes the value '", name, "'; it is of another program");
  }

 private:
  template <class Part>
  void part(const std::string& name, Part& part) {
    const auto outer = std::exchange(prefix_, name + '.');
    try {
      part.state(*this);
    } catch (...) {
      prefix_ = outer;
      throw;
    }
    prefix_ = outer;
  }

  /// The alternative of `Value` that holds a `T`.
  template <class T>
  static auto stored(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::string> || std::is_same_v<T, at::Tensor>,
                  "Archive: a value must be a number, a flag, a text, a tensor, or have state(Archive&)");
    if constexpr (std::is_same_v<T, at::Tensor>)
      return value.defined() ? value.detach().clone() : value;
    else if constexpr (std::integral<T> && !std::is_same_v<T, bool>)
      return static_cast<std::int64_t>(value);
    else if constexpr (std::floating_point<T>)
      return static_cast<double>(value);
    else
      return value;
  }

  template <class T>
  void load(const std::string& name, T& value) const {
    const auto found = values_.find(name);
    TORCH_CHECK(found != values_.end(), "Archive: must have a value '", name, "', but has none");
    const auto* const held = std::get_if<decltype(stored(value))>(&found->second);
    TORCH_CHECK(held, "Archive: the value '", name, "' is of another type");
    auto loaded = static_cast<T>(stored(*held));
    if constexpr (std::is_arithmetic_v<T>)
      TORCH_CHECK(!(stored(loaded) < *held || stored(loaded) > *held), "Archive: the value '", name,
                  "' does not fit, got ", *held);
    value = std::move(loaded);
  }

  Values values_;
  std::set<std::string> used_;
  std::string prefix_;
  bool loading_ = false;
};

}  // namespace gradaccum
