// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/kineto_session.hpp>
#include <gradaccum/profile_report.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace gradaccum::detail {

/// The time and memory of operations without those that they called. An operation was called by another if its event
/// lies within the other's on the same thread.
class OperationTable {
 public:
  explicit OperationTable(const std::vector<ProfiledEvent>& events);

  /// Returns the operations by self time on the CPU and on devices, descending, and then by name.
  std::vector<ProfiledOperation> by_time() const;

 private:
  struct Open {
    const ProfiledEvent* event;
    ProfiledOperation* row;
    std::int64_t of_others = 0;  // nanoseconds
  };

  void go_through(std::vector<const ProfiledEvent*> of_one_thread);
  void close_until(const ProfiledEvent& event);
  void close_last();
  ProfiledOperation& row_of(const ProfiledEvent& event);

  std::map<std::string, ProfiledOperation> rows_;
  std::unordered_map<std::uint64_t, ProfiledOperation*> by_correlation_;
  std::vector<Open> open_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/operation_table.ipp>
#endif
