// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/state/owned_tensor.hpp>
#include <gradaccum/detail/state/pending_changes.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

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
/// @note Does not synchronise with the device.
class Archive {
 public:
  using Value = std::variant<bool, std::int64_t, double, std::string, at::Tensor>;
  using Values = std::map<std::string, Value, std::less<>>;
  using Tensors = std::map<std::string, at::Tensor>;

  Archive() = default;                                                             ///< to save into
  explicit Archive(Values values) : values_(std::move(values)), loading_(true) {}  ///< to load from

  /// To save into, without copies: its tensors are those of the parts, as long as these do not change them.
  static Archive of_references() {
    Archive archive;
    archive.copies_ = false;
    return archive;
  }

  bool loading() const { return loading_; }
  const Values& values() const { return values_; }

  template <class T>
  void operator()(std::string_view name, T&& value) {
    const auto full = take_name(name);
    if constexpr (requires { value.state(*this); })
      part(full, value);
    else if constexpr (requires { value.has_value(); })
      optional(full, value);
    else if (loading_)
      load(full, value);
    else
      values_[full] = stored(value);
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
    TORCH_CHECK(before == value || changes_allowed_, "Archive: the state was saved with ", prefix_, name, " = ", before,
                ", and here it is ", value, "; give it the same, or load with {.allow_changes = true}");
  }
  void allow_changes(bool allow) { changes_allowed_ = allow; }
  bool changes_allowed() const { return changes_allowed_; }

  /// Runs `load`. If all of it, and of what is around it, has been loaded, then comes what was given to `when_all_fit`;
  /// an exception forgets that.
  template <class Load>
  void together(const Load& load) {
    pending_.together(load);
  }
  /// At once when saving, and where there is nothing that is loaded together with it.
  void when_all_fit(std::function<void()> change) { pending_.when_all_fit(std::move(change)); }
  /// What undoes a change that did not wait, where something after it does not fit; the last one first.
  void if_not_all_fit(std::function<void()> undo) {
    if (loading_) pending_.if_not_all_fit(std::move(undo));
  }
  /// To load what was saved a moment ago, into parts that were loaded from something else since; what waited there has
  /// not been changed, and does not change here.
  static Archive to_go_back(const Archive& before) {
    Archive archive(before.values());
    archive.pending_.wait_forever();
    return archive;
  }

  /// Among what is loaded there is a part of this name.
  bool has(const std::string& part) const {
    const auto [first, last] = range(prefix_ + part + '.');
    return loading_ && first != last;
  }
  /// Nobody here wants that part.
  void leave_out(const std::string& part) {
    const auto [first, last] = range(prefix_ + part + '.');
    for (auto value = first; value != last; ++value) used_.insert(value->first);
  }
  /// Throws if there are values that nobody has asked for: they belong to another program.
  void check_all_used() const {
    for (auto& [name, value] : values_)
      TORCH_CHECK(used_.contains(name), "Archive: nobody takes the value '", name, "'; it is of another program");
  }

 private:
  std::string take_name(std::string_view name) {
    auto full = prefix_ + std::string(name);
    TORCH_CHECK(used_.insert(full).second, "Archive: two values are named '", full, "'; give each part another name");
    return full;
  }

  /// All whose names begin so.
  std::pair<Values::const_iterator, Values::const_iterator> range(const std::string& prefix) const {
    auto after = prefix;
    ++after.back();
    return std::pair(values_.lower_bound(prefix), values_.lower_bound(after));
  }

  /// Where changes are allowed, a part of which there is nothing stays as it is; so does a value.
  template <class Part>
  void part(const std::string& name, Part& part) {
    if (const auto [first, last] = range(name + '.'); loading_ && changes_allowed_ && first == last) return;
    const auto outer = std::exchange(prefix_, name + '.');
    try {
      together([&] { part.state(*this); });
    } catch (...) {
      prefix_ = outer;
      throw;
    }
    prefix_ = outer;
  }

  /// One that has no value is not there.
  template <class Optional>
  void optional(const std::string& name, Optional& value) {
    if (loading_ && !values_.contains(name))
      value.reset();
    else if (loading_)
      load(name, value.emplace());
    else if (value)
      values_[name] = stored(*value);
  }

  at::Tensor kept(const at::Tensor& tensor) const {
    return tensor.defined() && copies_ ? tensor.detach().clone() : tensor;
  }

  /// The alternative of `Value` that holds a `T`.
  template <class T>
  auto stored(const T& value) const {
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::string> || std::is_same_v<T, at::Tensor>,
                  "Archive: a value must be a number, a flag, a text, a tensor, or have state(Archive&)");
    if constexpr (std::is_same_v<T, at::Tensor>)
      return kept(value);
    else if constexpr (std::integral<T> && !std::is_same_v<T, bool>)
      return static_cast<std::int64_t>(value);
    else if constexpr (std::floating_point<T>)
      return static_cast<double>(value);
    else
      return value;
  }

  template <class T>
  void load(const std::string& name, T& value) {
    const auto found = values_.find(name);
    if (found == values_.end() && changes_allowed_) return;
    TORCH_CHECK(found != values_.end(), "Archive: must have a value '", name, "', but has none");
    auto* const held = std::get_if<decltype(stored(value))>(&found->second);
    TORCH_CHECK(held, "Archive: the value '", name, "' is of another type");
    if constexpr (std::is_same_v<T, at::Tensor>) {
      value = detail::owned(std::move(*held));
      return;
    }
    auto loaded = static_cast<T>(*held);
    if constexpr (std::is_arithmetic_v<T>)
      TORCH_CHECK(!(stored(loaded) < *held || stored(loaded) > *held), "Archive: the value '", name,
                  "' does not fit, got ", *held);
    value = std::move(loaded);
  }

  Values values_;
  std::set<std::string> used_;
  std::string prefix_;
  detail::PendingChanges pending_;
  bool loading_ = false, copies_ = true, changes_allowed_ = false;
};

inline void Archive::tensors(Tensors& tensors) {
  if (!loading_) {
    for (auto& [name, tensor] : tensors) values_[take_name(name)] = kept(tensor);
    return;
  }
  tensors.clear();
  for (auto value = values_.lower_bound(prefix_); value != values_.end() && value->first.starts_with(prefix_); ++value)
    if (auto* const tensor = std::get_if<at::Tensor>(&value->second); tensor && used_.insert(value->first).second)
      tensors.emplace(value->first.substr(prefix_.size()), std::move(*tensor));
}

}  // namespace gradaccum
