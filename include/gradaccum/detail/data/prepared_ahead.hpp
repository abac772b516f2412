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

/// A queue of objects that a thread prepares in order.
///
/// The thread starts with `start` or the first `take`, and again with the next one after `stop`. It ends after the last
/// object, or when `make` throws. Only one thread may take objects.
class PreparedAhead {
 public:
  /// Makes the next object; null after the last.
  using Make = std::function<std::unique_ptr<Prepared>()>;

  /// Keeps at most `depth` objects ready.
  PreparedAhead(std::size_t depth, Make make) : depth_(depth), make_(std::move(make)) {}
  PreparedAhead(const PreparedAhead&) = delete;
  PreparedAhead& operator=(const PreparedAhead&) = delete;
  ~PreparedAhead() { stop(); }

  /// Starts the thread, which fills the queue.
  void start();
  /// Returns the next object; null after the last. Rethrows an exception of `make` in its place.
  std::unique_ptr<Prepared> take();
  /// Stops the thread, after the object that it is making. Objects that are ready stay.
  void stop();
  /// Discards the objects that are ready. The thread must be stopped.
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
  std::deque<Entry> made_;  // an entry without `made` is the last
  bool working_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/prepared_ahead.ipp>
#endif
