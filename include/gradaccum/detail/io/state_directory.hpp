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

/// A state's name: `step-000040`; where that was taken, `step-000040.1`, `step-000040.2` and so on. Ordered by time.
struct StateName {
  std::int64_t step = 0, repeat = 0;

  auto operator<=>(const StateName&) const = default;

  std::string text() const;

  /// None where this is not a state's name, to the letter: no other name may mean the same state.
  static std::optional<StateName> of(std::string_view text);
};

/// Two states were saved after as many updates.
bool of_one_step(const std::filesystem::path& one, const std::filesystem::path& other);

/// A directory of states, each a folder of files that appears whole or not at all, and never changes. Killed at any
/// moment, in a power failure as well, all that `finished` lists is whole. One writer at a time. What has other names
/// is never touched.
///
/// Throws `std::runtime_error` with a name.
class StateDirectory {
 public:
  struct State : StateName {
    std::filesystem::path path;
  };

  explicit StateDirectory(std::filesystem::path path) : path_(std::move(path)) {}

  /// The oldest first.
  std::vector<State> finished() const;

  /// Makes a new state: `write(folder)` puts files into it, and syncs them. Gives the folder's path.
  std::filesystem::path add(std::int64_t step, const std::function<void(const std::filesystem::path&)>& write);

  /// Of two states of one step the newer takes the older one's name, and place. Gives its path.
  std::filesystem::path replace(const std::filesystem::path& older, const std::filesystem::path& newer);

  /// Removes all but the `count` newest and those in `others`.
  void keep_last(std::int64_t count, const std::vector<std::filesystem::path>& others = {});

  /// Removes what was not finished, or was being removed, when a process ended; the others do so as well.
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
