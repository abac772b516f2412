// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/operation_table.hpp>

#include <algorithm>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

using EventKind = ProfiledEvent::Kind;

GRADACCUM_INLINE OperationTable::OperationTable(const std::vector<ProfiledEvent>& events) {
  std::map<std::uint64_t, std::vector<const ProfiledEvent*>> by_thread;
  for (auto& event : events)
    if (event.kind != EventKind::kernel) by_thread[event.thread].push_back(&event);
  for (auto& [thread, of_it] : by_thread) go_through(std::move(of_it));
  for (auto& event : events) {
    if (event.kind != EventKind::kernel) continue;
    const auto operation = by_correlation_.find(event.correlation);
    if (operation != by_correlation_.end())
      operation->second->device_seconds += 1e-9 * static_cast<double>(event.duration());
  }
}

/// Orders events by their beginning. If two operations begin together, the outer one comes first; memory comes last, so
/// that it belongs to the inner one.
GRADACCUM_INLINE bool comes_before(const ProfiledEvent* a, const ProfiledEvent* b) {
  if (a->begin != b->begin) return a->begin < b->begin;
  const bool a_is_memory = a->kind == EventKind::memory, b_is_memory = b->kind == EventKind::memory;
  return a_is_memory != b_is_memory ? b_is_memory : a->end > b->end;
}

GRADACCUM_INLINE void OperationTable::go_through(std::vector<const ProfiledEvent*> of_one_thread) {
  std::stable_sort(of_one_thread.begin(), of_one_thread.end(), comes_before);
  for (const auto* event : of_one_thread) {
    close_until(*event);
    if (event->kind != EventKind::memory) {
      open_.push_back({event, &row_of(*event)});
    } else if (!open_.empty()) {
      auto& row = *open_.back().row;
      row.allocated_bytes += std::max<std::int64_t>(event->bytes, 0);
      row.kept_bytes += event->bytes;
    }
  }
  while (!open_.empty()) close_last();
}

GRADACCUM_INLINE void OperationTable::close_until(const ProfiledEvent& event) {
  const auto is_over = [&](const Open& open) {
    return event.kind == EventKind::memory ? open.event->end < event.begin : open.event->end <= event.begin;
  };
  while (!open_.empty() && is_over(open_.back())) close_last();
}

/// Ends the innermost operation. The time of one that calls itself, even indirectly, counts once.
GRADACCUM_INLINE void OperationTable::close_last() {
  const auto last = open_.back();
  open_.pop_back();
  const auto duration = last.event->duration();
  last.row->self_cpu_seconds += 1e-9 * static_cast<double>(std::max<std::int64_t>(duration - last.of_others, 0));
  if (std::none_of(open_.begin(), open_.end(), [&](const Open& outer) { return outer.row == last.row; }))
    last.row->cpu_seconds += 1e-9 * static_cast<double>(duration);
  if (!open_.empty()) open_.back().of_others += duration;
}

GRADACCUM_INLINE ProfiledOperation& OperationTable::row_of(const ProfiledEvent& event) {
  auto& row = rows_[event.name];
  row.name = event.name;
  ++row.calls;
  by_correlation_[event.correlation] = &row;
  return row;
}

GRADACCUM_INLINE std::vector<ProfiledOperation> OperationTable::by_time() const {
  std::vector<ProfiledOperation> operations;
  for (auto& [name, row] : rows_) operations.push_back(row);
  const auto own_time = [](const ProfiledOperation& of) { return of.self_cpu_seconds + of.device_seconds; };
  std::stable_sort(operations.begin(), operations.end(),
                   [&](const auto& a, const auto& b) { return own_time(a) > own_time(b); });
  return operations;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
