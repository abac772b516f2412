// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/pending_changes.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/StringUtil.h>

#include <concepts>
#include <cstdint>
#include <functional>
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
/// A value is a number, a flag, a text, a tensor, a `std::optional` of these, or a part that has `state(Archive&)`.
/// Tensors are copied, both ways: a loaded one is new. A name that is there twice, is missing, or has a value of
/// another type or out of range throws; what a part has loaded before that stays, so a part that must not be
/// half-changed loads into locals first, or leaves what it changes to `when_all_fit`.
///
/// @note Does not wait for the device.
class Archive {
 public:
  using Value = std::variant<bool, std::int64_t, double, std::string, at::Tensor>;
  using Values = std::map<std::string, Value, std::less<>>;
  using Tensors = std::map<std::string, at::Tensor>;

  Archive();                        ///< to save into
  explicit Archive(Values values);  ///< to load from
  Archive(const Archive&);
  Archive(Archive&&) noexcept;
  Archive& operator=(const Archive&);
  Archive& operator=(Archive&&) noexcept;
  ~Archive();

  /// To save into, without copies: its tensors are those of the parts, as long as these do not change them.
  static Archive of_references();

  bool loading() const { return loading_; }
  const Values& values() const { return values_; }

  template <class T>
  void operator()(std::string_view name, T&& value) {
    if constexpr (requires { value.state(*this); })
      part(name, [&] { value.state(*this); });
    else if constexpr (requires { value.has_value(); })
      optional(name, value);
    else
      convertible(name, value);
  }

  /// Tensors whose names the part alone knows: all that nobody has asked for. Loaded ones may be somebody else's, too:
  /// to be copied, not kept.
  void tensors(Tensors& tensors);

  /// What must be the same in a training that goes on, as the number of micro-batches: it is saved, and where a loaded
  /// value is another, that is an error which names both; unless changes are allowed.
  template <class T>
  void setting(std::string_view name, const T& value) {
    auto before = value;
    (*this)(name, before);
    if (before == value) return;
    if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>)
      differs<Shown<T>>(name, before, value);
    else
      differs(name, c10::str(before), c10::str(value));
  }
  void allow_changes(bool allow) { changes_allowed_ = allow; }
  bool changes_allowed() const { return changes_allowed_; }

  /// Runs `load`. If all of it, and of what is around it, has been loaded, then comes what was given to `when_all_fit`;
  /// an exception forgets that.
  void together(c10::function_ref<void()> load) { pending_.together(load); }
  /// At once when saving, and where there is nothing that is loaded together with it.
  void when_all_fit(std::function<void()> change);
  /// What undoes a change that did not wait, where something after it does not fit; the last one first.
  void if_not_all_fit(std::function<void()> undo);
  /// To load what was saved a moment ago, into parts that were loaded from something else since; what waited there has
  /// not been changed, and does not change here.
  static Archive to_go_back(const Archive& before);

  /// Among what is loaded there is a part of this name.
  bool has(const std::string& part) const;
  /// Nobody here wants that part.
  void leave_out(const std::string& part);
  /// Throws if there are values that nobody has asked for: they belong to another program.
  void check_all_used() const;

 private:
  template <class T>
  static constexpr bool is_whole = std::integral<T> && !std::is_same_v<T, bool>;
  /// The alternative of `Value` that holds a `T`.
  template <class T>
  using Held =
      std::conditional_t<is_whole<T>, std::int64_t, std::conditional_t<std::is_floating_point_v<T>, double, T>>;
  /// What a message shows a `T` as.
  template <class T>
  using Shown = std::conditional_t<is_whole<T> && std::is_unsigned_v<T>, std::uint64_t, Held<T>>;

  std::string take_name(std::string_view name);
  std::pair<Values::const_iterator, Values::const_iterator> range(const std::string& prefix) const;
  at::Tensor kept(const at::Tensor& tensor) const;

  void part(std::string_view name, c10::function_ref<void()> state);

  /// Whether there is something to be saved, which `has_value` says, or to be loaded.
  bool is_there(std::string_view name, bool has_value);

  /// One that has no value is not there.
  template <class Optional>
  void optional(std::string_view name, Optional& value) {
    if (is_there(name, value.has_value()))
      convertible(name, loading_ ? value.emplace() : *value);
    else if (loading_)
      value.reset();
  }

  template <class T>
  void convertible(std::string_view name, T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::string> || std::is_same_v<T, at::Tensor>,
                  "Archive: a value must be a number, a flag, a text, a tensor, or have state(Archive&)");
    if constexpr (std::is_same_v<T, Held<T>>) {
      alternative(name, value);
    } else {
      auto held = static_cast<Held<T>>(value);
      if (!alternative(name, held)) return;
      const auto loaded = static_cast<T>(held);
      if (static_cast<Held<T>>(loaded) < held || static_cast<Held<T>>(loaded) > held) does_not_fit(name, held);
      value = loaded;
    }
  }

  /// Of these `T` are the alternatives of `Value`. True if it was loaded.
  template <class T>
  bool alternative(std::string_view name, T& value);
  template <class T>
  void does_not_fit(std::string_view name, T held) const;
  template <class T>
  void differs(std::string_view name, const T& before, const T& here) const;

  Values values_;
  std::set<std::string> used_;
  std::string prefix_;
  detail::PendingChanges pending_;
  bool loading_ = false, copies_ = true, changes_allowed_ = false;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/archive.ipp>
#endif
