// SPDX-License-Identifier: Apache-2.0
#include "device_memory.hpp"

#include "address_range.hpp"
#include "emulated_cuda.hpp"
#include "graphs.hpp"

#include <c10/util/Exception.h>

#include <array>
#include <cstring>

namespace emulated_cuda {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr std::size_t block_bytes = 512;  // the rounding of CUDA's caching allocator

std::atomic<std::int64_t> allocations_until_failure = 0;
std::atomic<bool> fill_new_memory = true;

std::size_t rounded(std::size_t bytes) { return (bytes + block_bytes - 1) / block_bytes * block_bytes; }

/// Returns the total of a statistic that LibTorch also keeps for small and large blocks.
Stat& all(StatArray& statistic) {
  return statistic[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}
const Stat& all(const StatArray& statistic) { return all(const_cast<StatArray&>(statistic)); }

template <class Do>
void for_each_statistic(DeviceStats& statistics, Do&& apply) {
  for (auto* one : {&statistics.allocation, &statistics.active, &statistics.allocated_bytes, &statistics.active_bytes,
                    &statistics.requested_bytes, &statistics.reserved_bytes})
    apply(all(*one));
}

}  // namespace

MemoryPool::~MemoryPool() {
  for (auto* block : freed) memory.free(block);
}

DeviceMemory& DeviceMemory::of(c10::DeviceIndex device) {
  static auto& memories = *new std::array{new DeviceMemory(0), new DeviceMemory(1)};
  TORCH_CHECK(device >= 0 && device < number_of_devices, "CUDA error: invalid device ordinal ",
              static_cast<int>(device));
  return *memories[static_cast<std::size_t>(device)];
}

DeviceMemory::DeviceMemory(c10::DeviceIndex device) : device_(device) {
  add_free(AddressRange::get().begin_of(device), bytes_of_a_device);
}

char* DeviceMemory::allocate(std::size_t bytes) {
  touched_ = true;
  if (bytes == 0) return nullptr;
  auto* const graph = Graph::capturing(device_);
  const Block block{rounded(bytes), bytes, graph ? graph->memory() : nullptr};
  std::unique_lock lock(mutex_);
  const auto address = may_allocate(block.bytes) ? take(block.bytes) : std::nullopt;
  if (!address) throw_out_of_memory(bytes);
  used_.emplace(*address, block);
  count(block);
  lock.unlock();
  report(*address, static_cast<std::int64_t>(block.bytes));
  if (graph) graph->add_block(*address);
  if (fill_new_memory) std::memset(AddressRange::get().host(*address), 0xFF, block.bytes);
  return *address;
}

void DeviceMemory::free(char* address) {
  std::shared_ptr<MemoryPool> pool;  // destroyed after the lock is released
  std::unique_lock lock(mutex_);
  const auto found = used_.find(address);
  TORCH_INTERNAL_ASSERT(found != used_.end(), "emulated CUDA: this block is not in use");
  const auto block = found->second;
  pool = block.pool.lock();
  if (pool) return pool->freed.push_back(address);
  used_.erase(found);
  put_back(address, block.bytes);
  discount(block);
  lock.unlock();
  report(address, -static_cast<std::int64_t>(block.bytes));
}

std::shared_ptr<MemoryPool> DeviceMemory::pool(gradaccum::detail::GraphPool id) {
  const std::lock_guard lock(mutex_);
  auto pool = pools_[id].lock();
  if (!pool) pools_[id] = pool = std::make_shared<MemoryPool>(*this);
  return pool;
}

void DeviceMemory::release_free_pages() {
  const std::lock_guard lock(mutex_);
  for (auto& [address, bytes] : free_by_address_) AddressRange::get().release(address, bytes);
  all(statistics_.reserved_bytes).current = all(statistics_.allocated_bytes).current;
}

DeviceStats DeviceMemory::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void DeviceMemory::reset_peak() {
  const std::lock_guard lock(mutex_);
  for_each_statistic(statistics_, [](Stat& statistic) { statistic.reset_peak(); });
}

void DeviceMemory::reset_accumulated() {
  const std::lock_guard lock(mutex_);
  for_each_statistic(statistics_, [](Stat& statistic) { statistic.reset_accumulated(); });
  statistics_.num_ooms = 0;
}

bool DeviceMemory::may_allocate(std::size_t bytes) {
  if (allocations_until_failure > 0 && --allocations_until_failure == 0) return false;
  const auto limit = limit_.load();
  return limit < 0 || all(statistics_.allocated_bytes).current + static_cast<std::int64_t>(bytes) <= limit;
}

std::optional<char*> DeviceMemory::take(std::size_t bytes) {
  const auto best = free_by_size_.lower_bound({bytes, nullptr});
  if (best == free_by_size_.end()) return std::nullopt;
  const auto [size, address] = *best;
  remove_free(address, size);
  if (size > bytes) add_free(address + bytes, size - bytes);
  return address;
}

/// Frees a block, and merges it with free neighbors.
void DeviceMemory::put_back(char* address, std::size_t bytes) {
  const auto next = free_by_address_.lower_bound(address);
  if (next != free_by_address_.end() && address + bytes == next->first) {
    const auto [other, size] = *next;
    remove_free(other, size);
    bytes += size;
  }
  const auto after = free_by_address_.lower_bound(address);
  if (after != free_by_address_.begin()) {
    const auto [other, size] = *std::prev(after);
    if (other + size == address) {
      remove_free(other, size);
      address = other;
      bytes += size;
    }
  }
  add_free(address, bytes);
}

void DeviceMemory::add_free(char* address, std::size_t bytes) {
  free_by_address_.emplace(address, bytes);
  free_by_size_.emplace(bytes, address);
}

void DeviceMemory::remove_free(char* address, std::size_t bytes) {
  free_by_address_.erase(address);
  free_by_size_.erase({bytes, address});
}

void DeviceMemory::throw_out_of_memory(std::size_t bytes) {
  ++statistics_.num_ooms;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", c10::CachingAllocator::format_size(bytes),
      ". GPU ", static_cast<int>(device_), " is emulated; ",
      c10::CachingAllocator::format_size(static_cast<std::uint64_t>(all(statistics_.allocated_bytes).current)),
      " are in use.");
}

/// Counts freed memory as reserved, like CUDA's caching allocator.
void DeviceMemory::count(const Block& block) {
  all(statistics_.allocation).increase(1);
  all(statistics_.active).increase(1);
  all(statistics_.allocated_bytes).increase(block.bytes);
  all(statistics_.active_bytes).increase(block.bytes);
  all(statistics_.requested_bytes).increase(block.requested);
  const auto more = all(statistics_.allocated_bytes).current - all(statistics_.reserved_bytes).current;
  if (more > 0) all(statistics_.reserved_bytes).increase(static_cast<std::size_t>(more));
}

void DeviceMemory::discount(const Block& block) {
  all(statistics_.allocation).decrease(1);
  all(statistics_.active).decrease(1);
  all(statistics_.allocated_bytes).decrease(block.bytes);
  all(statistics_.active_bytes).decrease(block.bytes);
  all(statistics_.requested_bytes).decrease(block.requested);
}

/// Reports to LibTorch's profiler and to other listeners.
void DeviceMemory::report(char* block, std::int64_t change) const {
  const auto now = statistics();
  c10::reportMemoryUsageToProfiler(block, change, static_cast<std::size_t>(all(now.allocated_bytes).current),
                                   static_cast<std::size_t>(all(now.reserved_bytes).current), {c10::kCUDA, device_});
}

}  // namespace emulated_cuda

namespace {
emulated_cuda::DeviceMemory& memory_of(int device) {
  return emulated_cuda::DeviceMemory::of(static_cast<c10::DeviceIndex>(device));
}
}  // namespace

EmulatedCudaMemory emulated_cuda_memory(int device) {
  const auto statistics = memory_of(device).statistics();
  const auto &bytes = statistics.allocated_bytes[0], &blocks = statistics.allocation[0];
  return {bytes.current, bytes.peak, blocks.current, blocks.allocated};
}

void emulated_cuda_reset_peak(int device) { memory_of(device).reset_peak(); }
void emulated_cuda_fail_allocation(std::int64_t nth) { emulated_cuda::allocations_until_failure = nth; }
void emulated_cuda_limit_memory(int device, std::int64_t bytes) { memory_of(device).set_limit(bytes); }
void emulated_cuda_fill_new_memory(bool fill) { emulated_cuda::fill_new_memory = fill; }
