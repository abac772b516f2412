// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <compare>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The name of a state: `step-000040`, or `step-000040.1`, `.2` and so on if that is taken. Ordered by time.
struct StateName {
  std::int64_t step = 0, repeat = 0;

  auto operator<=>(const StateName&) const = default;

  std::string text() const;

  /// Parses a name; nullopt unless `text()` gives exactly `text`, so that no two names mean the same state.
  static std::optional<StateName> of(std::string_view text);
};

/// Returns true if both states were saved after the same number of updates.
bool of_one_step(const std::filesystem::path& one, const std::filesystem::path& other);

/// A directory of states. Each is a folder that appears atomically and never changes, even if the process is killed or
/// the power fails: all that `finished` lists is complete. One writer at a time. Other names are never touched.
///
/// Throws `std::runtime_error` with a path.
class StateDirectory {
 public:
  struct State : StateName {
    std::filesystem::path path;
  };

  explicit StateDirectory(std::filesystem::path path) : path_(std::move(path)) {}

  /// The complete states, oldest first.
  std::vector<State> finished() const;

  /// Adds a state and returns its path. `write(folder)` creates the files and syncs them.
  std::filesystem::path add(std::int64_t step, const std::function<void(const std::filesystem::path&)>& write);

  /// Replaces `older` by `newer`, a state of the same step, under the older one's name. Returns that path.
  std::filesystem::path replace(const std::filesystem::path& older, const std::filesystem::path& newer);

  /// Removes all states except the `count` newest and `others`.
  void keep_last(std::int64_t count, const std::vector<std::filesystem::path>& others = {});

  /// Removes folders that a killed process left half written or half removed. The other writing methods do so too.
  void sweep() const;

 private:
  std::vector<std::filesystem::path> leftovers() const;
  void remove_leftovers() const;
  std::filesystem::path name_for(std::int64_t step) const;

  std::filesystem::path path_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/state_directory.ipp>
#endif
