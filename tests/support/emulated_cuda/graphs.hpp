// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/device_graph.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulated_cuda {

struct MemoryPool;

/// Work that was captured on a stream, to be replayed.
///
/// CPU kernels have to run while they are captured, because only they determine the shapes of their results; the end of
/// the capture restores the memory that they wrote. Each is recorded as a function that repeats it in the same memory.
class Graph final : public gradaccum::detail::GraphImplInterface {
 public:
  /// Returns the graph that captures this thread's work on a device; null if the work is executed.
  static Graph* capturing(c10::DeviceIndex device);
  static Graph* capturing(const c10::Stream& stream);
  /// Makes a stream wait for an event of the numbered capture, which then captures the stream, too.
  static void join(std::uint64_t capture, c10::DeviceIndex device, const c10::Stream& stream);
  /// Ends the captures of this thread's streams with an error, because the next operation is not allowed in them.
  static void refuse_in_captures();

#if __has_include(<ATen/core/GraphImplInterface.h>)
  explicit Graph(const at::GraphImplArgs& /*arguments*/ = {}) {}
  void capture_begin(gradaccum::detail::GraphPool pool, at::GraphCaptureMode /*mode*/) override { begin(pool); }
  void instantiate() override { check_captured(); }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& /*path*/) override {}
  void reset() override { forget(); }
#else
  Graph() = default;
  void capture_begin(gradaccum::detail::GraphPool pool) override { begin(pool); }
#endif
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() override { forget(); }
  void capture_end() override;
  void replay() override;
  gradaccum::detail::GraphPool pool() const override;

  std::uint64_t number_of_capture() const { return capture_; }
  /// Returns the pool of blocks that are allocated during the capture.
  const std::shared_ptr<MemoryPool>& memory() const { return memory_; }

  /// Records memory that is allocated during the capture and has no content before a replay.
  void add_block(const void* block);
  /// Saves the bytes of an operation's argument before it runs, or of a result, until the end of the capture.
  void save(const at::Tensor& tensor);
  /// Returns the same memory without ownership, because a graph holds addresses and keeps nothing alive.
  c10::Storage fixed(const c10::Storage& storage);
  void record(std::function<void()> work);

 private:
  struct Saved {
    c10::Storage storage;
    std::string bytes;  // empty for memory that was allocated during the capture
    int fill;
  };

  static Graph* capturing(c10::DeviceIndex device, c10::StreamId stream);
  void begin(gradaccum::detail::GraphPool pool);
  void undo();
  void forget();
  void check_valid() const;
  void check_captured() const;

  std::mutex mutex_;  // autograd's threads issue work, too
  c10::DeviceIndex device_ = 0;
  std::uint64_t capture_ = 0;
  std::vector<c10::StreamId> streams_;  // the capture began on the first
  gradaccum::detail::GraphPool pool_ = {0, 0};
  std::shared_ptr<MemoryPool> memory_;
  at::Tensor numbers_;  // the state of the device's generator before the capture
  std::set<const void*> blocks_;
  std::vector<Saved> saved_;
  std::map<std::pair<const void*, const void*>, c10::Storage> fixed_;  // by storage and address
  std::vector<std::function<void()>> work_;
  std::atomic<bool> invalid_ = false;
  bool captured_ = false;
};

}  // namespace emulated_cuda
