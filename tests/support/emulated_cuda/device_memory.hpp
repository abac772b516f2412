// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emulated_cuda {

class DeviceMemory;

/// The memory of graphs. While a graph lives, its freed blocks are not reused.
struct MemoryPool {
  explicit MemoryPool(DeviceMemory& all) : memory(all) {}
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  ~MemoryPool();

  DeviceMemory& memory;
  std::vector<char*> freed = {};
};

/// The blocks of one device's memory, allocated by best fit.
class DeviceMemory {
 public:
  /// Returns a device's memory, which is never destroyed, because tensors may live until the program ends.
  static DeviceMemory& of(c10::DeviceIndex device);

  explicit DeviceMemory(c10::DeviceIndex device);

  /// Throws `c10::OutOfMemoryError`.
  char* allocate(std::size_t bytes);
  void free(char* block);
  void release_free_pages();
  std::shared_ptr<MemoryPool> pool(gradaccum::detail::GraphPool id);

  /// Returns whether the device was ever used, as a CUDA context shows.
  bool touched() const { return touched_; }
  c10::CachingDeviceAllocator::DeviceStats statistics() const;
  void reset_peak();
  void reset_accumulated();
  void set_limit(std::int64_t bytes) { limit_ = bytes; }

 private:
  struct Block {
    std::size_t bytes, requested;
    std::weak_ptr<MemoryPool> pool;
  };

  bool may_allocate(std::size_t bytes);
  std::optional<char*> take(std::size_t bytes);
  void put_back(char* address, std::size_t bytes);
  void add_free(char* address, std::size_t bytes);
  void remove_free(char* address, std::size_t bytes);
  [[noreturn]] void throw_out_of_memory(std::size_t bytes);
  void count(const Block& block);
  void discount(const Block& block);
  void report(char* block, std::int64_t change) const;

  const c10::DeviceIndex device_;
  mutable std::mutex mutex_;
  std::map<char*, std::size_t> free_by_address_;
  std::set<std::pair<std::size_t, char*>> free_by_size_;
  std::unordered_map<char*, Block> used_;
  std::map<gradaccum::detail::GraphPool, std::weak_ptr<MemoryPool>> pools_;
  c10::CachingDeviceAllocator::DeviceStats statistics_;
  std::atomic<std::int64_t> limit_ = -1;
  std::atomic<bool> touched_ = false;
};

}  // namespace emulated_cuda
