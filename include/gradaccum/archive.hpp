// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: state

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum {

namespace detail {
template <class T, class A>
requires(!std::is_same_v<T, bool>) void element_of(const std::vector<T, A>&);
template <class T, std::size_t size>
void element_of(const std::array<T, size>&);
}  // namespace detail

/// Named values, saved and loaded by the same function: `state(Archive&)`.
///
///     struct Counter {
///       std::int64_t count = 0;
///       void state(ga::Archive& archive) { archive("count", count); }
///     } counter{.count = 3}, other;
///     ga::Archive saved;
///     saved("counter", counter);                           // its values are named counter.count, …
///     ga::Archive(saved.values())("counter", other);       // other.count == 3
///
/// A value is a number, flag, string or tensor, a `std::optional` of these, a part that has `state(Archive&)`, or a
/// `std::vector` or `std::array` of these without tensors, whose size must be the saved one. Tensors are copied when
/// saved, and loaded tensors are new. Throws if a name is used twice or missing, or if its value has another type or is
/// out of range. Values that were loaded before remain: a part that must not be half-loaded loads into local variables
/// first, or defers its changes with `when_all_fit`. Does not synchronize.
class Archive {
 public:
  using Value = std::variant<bool, std::int64_t, double, std::string, at::Tensor>;
  using Values = std::map<std::string, Value, std::less<>>;
  using Tensors = std::map<std::string, at::Tensor>;

  Archive() = default;                                                             ///< for saving
  explicit Archive(Values values) : values_(std::move(values)), loading_(true) {}  ///< for loading

  /// Returns an archive for saving without copies: it refers to the parts' tensors, until a part changes them.
  static Archive of_references();

  bool loading() const { return loading_; }
  const Values& values() const { return values_; }

  template <class T>
  void operator()(std::string_view name, T&& value) {
    if constexpr (requires { value.state(*this); })
      part(name, [&] { value.state(*this); });
    else if constexpr (requires { value.has_value(); })
      optional(name, value);
    else if constexpr (requires { detail::element_of(value); })
      part(name, [&] { sequence(value); });
    else
      convertible(name, value);
  }

  /// Saves or loads tensors whose names the part chooses. Loads all of the part's tensors that no other call has
  /// loaded; they may be shared, so copy them rather than keep them.
  void tensors(Tensors& tensors);

  /// Saves a setting that must not change when a training resumes, such as the number of micro-batches. When loading,
  /// throws an error with both values if they differ, unless changes are allowed.
  template <class T>
  void setting(std::string_view name, const T& value) {
    auto before = value;
    (*this)(name, before);
    if (!(before == value)) differs(name, c10::str(Shown<T>(before)), c10::str(Shown<T>(value)));
  }
  void allow_changes(bool allow) { changes_allowed_ = allow; }
  bool changes_allowed() const { return changes_allowed_; }

  /// The numbers of ranks that saved a state and that load it. An archive has the values of one rank.
  struct Ranks {
    std::int64_t saved = 1, loading = 1;
    Values values = {};  ///< all values but tensors: rank 0's, and different ones under `rank_1.` and so on

    bool are_others() const { return saved != loading; }
  };
  /// Returns the folder that the values were read from, for errors.
  const std::string& folder() const { return folder_; }
  void set_folder(std::string folder) { folder_ = std::move(folder); }

  const Ranks& ranks() const { return ranks_; }
  void set_ranks(Ranks ranks) { ranks_ = std::move(ranks); }
  /// Returns the value that each rank has saved under a name.
  template <class T>
  std::vector<T> of_ranks(std::string_view name) const {
    std::vector<T> all;
    for (std::int64_t rank = 0; rank < ranks_.saved; ++rank)
      all.push_back(std::get<T>(of_rank(rank, name, Value(T()).index())));
    return all;
  }

  /// Runs `load`; calls may nest. After the outermost call has succeeded, the changes deferred by `when_all_fit` are
  /// made; after an exception they are dropped.
  void together(c10::function_ref<void()> load);
  /// Defers `change` until all values of `together` have loaded. Runs it immediately when saving or outside `together`.
  void when_all_fit(std::function<void()> change);
  /// Registers the undo of a change that was not deferred. If a later value does not fit, undos run in reverse order.
  void if_not_all_fit(std::function<void()> undo);
  /// Returns an archive that restores parts from `before`, after a load that failed has changed some of them. Changes
  /// that the failed load deferred have not happened, so `when_all_fit` does nothing here.
  static Archive to_go_back(const Archive& before);

  /// Returns true if the loaded values include a part of this name.
  bool has(const std::string& part) const;
  /// Marks a part as used, so that check_all_used() accepts it.
  void leave_out(const std::string& part);
  /// Throws if loaded values have not been used, as when another program saved them.
  void check_all_used() const;

 private:
  template <class T>
  static constexpr bool is_whole = std::integral<T> && !std::is_same_v<T, bool>;
  /// The alternative of `Value` that holds a `T`.
  template <class T>
  using Held =
      std::conditional_t<is_whole<T>, std::int64_t, std::conditional_t<std::is_floating_point_v<T>, double, T>>;
  /// The type in which messages print a `T`.
  template <class T>
  using Shown = std::conditional_t<is_whole<T> && std::is_unsigned_v<T>, std::uint64_t, Held<T>>;

  /// Returns the name with its parts' names in front, and throws if it is used a second time.
  std::string full_name(std::string_view name);
  std::pair<Values::const_iterator, Values::const_iterator> values_of_part(const std::string& part) const;
  const Value& of_rank(std::int64_t rank, std::string_view name, std::size_t type) const;
  at::Tensor saved(const at::Tensor& tensor) const;

  void part(std::string_view name, c10::function_ref<void()> state);

  template <class Sequence>
  void sequence(Sequence& values) {
    static_assert(!std::is_same_v<std::decay_t<decltype(values[0])>, at::Tensor>,
                  "Archive: loading would exchange the tensors of a vector, not those that they are copies of: save "
                  "ga::ModelState for a model's parameters, or use Archive::tensors");
    const auto size = std::ssize(values);
    auto saved = size;
    (*this)("size", saved);
    if (saved != size) does_not_fit("size", c10::str(saved, ", where the program has ", size));
    for (std::size_t i = 0; i < values.size(); ++i) (*this)(std::to_string(i), values[i]);
  }

  /// An empty optional is not saved.
  template <class Optional>
  void optional(std::string_view name, Optional& value) {
    if (loading_ ? values_.contains(prefix_ + std::string(name)) : value.has_value())
      return convertible(name, loading_ ? value.emplace() : *value);
    full_name(name);
    if (loading_) value.reset();
  }

  template <class T>
  void convertible(std::string_view name, T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::string> || std::is_same_v<T, at::Tensor>,
                  "Archive: a value must be a number, a flag, a text, a tensor, have state(Archive&), or be a "
                  "std::vector or std::array of these");
    Value any(std::in_place_type<Held<T>>, static_cast<Held<T>>(value));
    if (!save_or_load(name, any)) return;
    auto& held = std::get<Held<T>>(any);
    if constexpr (std::is_same_v<T, Held<T>>) {
      value = std::move(held);
    } else {
      const auto loaded = static_cast<T>(held);
      if (static_cast<Held<T>>(loaded) < held || static_cast<Held<T>>(loaded) > held)
        does_not_fit(name, c10::str(held));
      value = loaded;
    }
  }

  /// Saves a value, or loads one of the same type. Returns true if it has been loaded.
  bool save_or_load(std::string_view name, Value& value);
  [[noreturn]] void does_not_fit(std::string_view name, const std::string& held) const;
  void differs(std::string_view name, const std::string& before, const std::string& here) const;

  Values values_;
  std::set<std::string> used_;
  std::string prefix_, folder_;
  Ranks ranks_;
  std::vector<std::function<void()>> changes_, undo_;  // deferred until all values of together() have loaded
  int depth_ = 0;                                      // nesting depth of together()
  bool loading_ = false, copies_ = true, changes_allowed_ = false;
};

}  // namespace gradaccum

namespace gradaccum::detail {

/// Returns the tensor itself if nothing shares its memory, otherwise a copy.
at::Tensor owned(at::Tensor tensor);

/// Copies a loaded tensor into an existing one, whose aliases see the new values. If nothing else refers to `loaded`,
/// the two swap their memory instead, which takes no time even for large tensors (134 MB) and cannot fail.
void load_into(const at::Tensor& to, const at::Tensor& loaded);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/state/archive.ipp>
#endif
