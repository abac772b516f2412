// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace gradaccum::detail {

struct Prepared {
  virtual ~Prepared() = default;
};

/// What a thread makes before it is asked for, in order.
///
/// The thread begins with the first question, and again with the next one after `stop`; it ends by itself where there
/// is no more, or `make` throws. For one thread that asks.
class PreparedAhead {
 public:
  /// Makes the next one; null where there are no more.
  using Make = std::function<std::unique_ptr<Prepared>()>;

  /// At most `depth` wait to be taken.
  PreparedAhead(std::size_t depth, Make make) : depth_(depth), make_(std::move(make)) {}
  PreparedAhead(const PreparedAhead&) = delete;
  PreparedAhead& operator=(const PreparedAhead&) = delete;
  ~PreparedAhead() { stop(); }

  /// From here on the thread makes what it has room for.
  void start();
  /// The next one; null where there are no more. What `make` threw is thrown in its place.
  std::unique_ptr<Prepared> take();
  /// Waits for what is being made. What is there stays, and `make` runs no longer.
  void stop();
  /// Forgets what is there. Only when it is stopped.
  void clear() { made_.clear(); }

 private:
  struct Entry {
    std::unique_ptr<Prepared> made = nullptr;
    std::exception_ptr error = nullptr;
  };

  void start_locked();
  void work();
  Entry make_entry();

  std::size_t depth_;
  Make make_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> made_;  // one without `made` is the last
  bool working_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/prepared_ahead.ipp>
#endif
