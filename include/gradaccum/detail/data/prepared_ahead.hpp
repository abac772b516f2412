// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/FunctionRef.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace gradaccum::detail {

/// Detects, while it is alive, operations of this thread that draw from LibTorch's default generators, which all
/// threads share.
class [[nodiscard]] DrawWatch {
 public:
  DrawWatch();
  DrawWatch(const DrawWatch&) = delete;
  DrawWatch& operator=(const DrawWatch&) = delete;
  ~DrawWatch();

  /// The first operation that drew; empty if none did.
  const std::string& drawn() const;

 private:
  std::uint64_t handle_;
};

/// The LibTorch state of the constructing thread, for a thread that works for it: modes such as grad mode, the memory
/// meter, the current device, and the streams of devices in use.
class ThreadContext {
 public:
  ThreadContext();

  /// Runs `work` in that state on this thread. Its operations use no further threads: a second OpenMP team would
  /// compete with the first for cores, both spinning.
  void run(c10::function_ref<void()> work) const;

 private:
  struct Known;
  std::shared_ptr<const Known> known_;
};

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
