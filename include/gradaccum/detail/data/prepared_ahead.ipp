// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/prepared_ahead.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/thread_context.hpp>

#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE void PreparedAhead::start() {
  const std::lock_guard lock(mutex_);
  start_locked();
}

/// Joins an old thread while holding the lock, which a thread that has ended by itself no longer needs.
GRADACCUM_INLINE void PreparedAhead::start_locked() {
  const bool all_made = !made_.empty() && !made_.back().made;
  if (working_ || all_made) return;
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread([this, context = ThreadContext()] { context.run([this] { work(); }); });
  working_ = true;
}

GRADACCUM_INLINE std::unique_ptr<Prepared> PreparedAhead::take() {
  Entry next;
  {
    std::unique_lock lock(mutex_);
    start_locked();
    changed_.wait(lock, [this] { return !made_.empty(); });
    next = std::move(made_.front());
    made_.pop_front();
  }
  changed_.notify_all();
  if (next.error) std::rethrow_exception(next.error);
  return std::move(next.made);
}

GRADACCUM_INLINE void PreparedAhead::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  stopping_ = false;
}

GRADACCUM_INLINE void PreparedAhead::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || made_.size() < depth_; });
    if (stopping_) break;
    lock.unlock();
    auto next = make_entry();
    lock.lock();
    made_.push_back(std::move(next));
    changed_.notify_all();
    if (!made_.back().made) break;
  }
  working_ = false;
}

GRADACCUM_INLINE PreparedAhead::Entry PreparedAhead::make_entry() {
  try {
    return {.made = make_()};
  } catch (...) {
    return {.error = std::current_exception()};
  }
}

}  // namespace gradaccum::detail
