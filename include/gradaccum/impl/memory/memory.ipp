// SPDX-License-Identifier: Apache-2.0
// Counts allocated and freed memory, keeps freed memory, and reads the system's figures.
#pragma once

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/memory/page_allocator.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/memory_meter.hpp>

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <fstream>
#include <ostream>
#include <sstream>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE bool MemoryLedger::possible() {
  auto* const installed = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return !installed || dynamic_cast<MemoryLedger*>(installed);
}

GRADACCUM_INLINE std::shared_ptr<MemoryLedger> MemoryLedger::innermost(const char* impossible) {
  TORCH_CHECK(possible(), impossible);
  auto* const installed = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  return installed ? dynamic_cast<MemoryLedger&>(*installed).shared_from_this() : nullptr;
}

GRADACCUM_INLINE void MemoryLedger::reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated,
                                                      std::size_t reserved, c10::Device device) {
  if (surrounding_) surrounding_->reportMemoryUsage(block, bytes, allocated, reserved, device);
  const std::lock_guard lock(mutex_);
  // An existing entry at this address is of an older block whose free was not reported.
  add(device, -held_.exchange(block, std::max<std::int64_t>(bytes, 0)));
  if (bytes > 0) add(device, bytes);
}

GRADACCUM_INLINE void MemoryLedger::add(c10::Device device, std::int64_t bytes) {
  total_.add(bytes);
  auto known = std::ranges::find(by_device_, device, &std::pair<c10::Device, Account>::first);
  if (known == by_device_.end()) known = by_device_.insert(known, {device, Account()});
  known->second.add(bytes);
}

GRADACCUM_INLINE void AllocationLog::reportMemoryUsage(void* block, std::int64_t bytes, std::size_t allocated,
                                                       std::size_t reserved, c10::Device device) {
  MemoryLedger::reportMemoryUsage(block, bytes, allocated, reserved, device);
  const std::lock_guard lock(mutex_);
  if (bytes > 0) {
    live_[block] = entries_.size();
    entries_.push_back({bytes, 0});
  } else if (const auto live = live_.find(block); live != live_.end()) {  // other blocks are older than the scope
    entries_.push_back({-entries_[live->second].bytes, live->second});
    live_.erase(live);
  }
}

GRADACCUM_INLINE void AllocationLog::exclude(const at::Tensor& tensor) {
  for_each_storage(tensor, [this](const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    if (const auto live = live_.find(storage.data()); live != live_.end()) excluded_.push_back(live->second);
  });
}

GRADACCUM_INLINE AllocationLog::Bytes AllocationLog::between(std::size_t from, std::size_t to) const {
  const std::lock_guard lock(mutex_);
  Bytes bytes;
  for (std::size_t i = 0; i < to; ++i) {
    const auto& entry = entries_[i];
    if (std::ranges::find(excluded_, entry.bytes > 0 ? i : entry.allocation) == excluded_.end())
      bytes.live += entry.bytes;
    bytes.peak = i < from ? bytes.live : std::max(bytes.peak, bytes.live);
  }
  return bytes;
}

GRADACCUM_INLINE at::Tensor copied_to(at::Device device, const at::Tensor& of_host) {
  if (!device.is_cuda()) return of_host.to(device);
  return of_host.pin_memory().to(device, /*non_blocking=*/true);
}

GRADACCUM_INLINE std::optional<DeviceMemory> device_memory(c10::Device device) try {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  auto* const allocator = c10::getDeviceAllocator(device.type());
  const auto [free, total] = allocator->getMemoryInfo(device.index());
  DeviceMemory memory{static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
  if (allocator->initialized()) {  // the statistics throw before the first allocation
    const auto statistics = allocator->getDeviceStats(device.index());
    const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    memory.reserved = statistics.reserved_bytes[all].current;
    memory.allocated = statistics.allocated_bytes[all].current;
  }
  return memory;
#else
  static_cast<void>(device);
  return std::nullopt;
#endif
} catch (const c10::Error&) {  // LibTorch's allocators support this only for some devices
  return std::nullopt;
}

GRADACCUM_INLINE void empty_device_cache(c10::Device device) try {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  c10::getDeviceAllocator(device.type())->emptyCache();
#else
  static_cast<void>(device);
#endif
} catch (const c10::Error&) {  // a device without such an allocator
}

GRADACCUM_INLINE std::optional<std::int64_t> occupied_memory(c10::Device device) {
  if (device.is_cpu()) return bytes_after("VmRSS", text_of_system_file("/proc/self/status"));
  const auto memory = device_memory(device);
  return memory ? std::optional(memory->total - memory->free) : std::nullopt;
}

GRADACCUM_INLINE bool is_time_to_ask(std::optional<std::chrono::steady_clock::time_point> last) {
  return !last || std::chrono::steady_clock::now() - *last >= std::chrono::milliseconds(500);
}

GRADACCUM_INLINE void for_each_storage(const at::Tensor& tensor, c10::function_ref<void(const c10::Storage&)> use) {
  if (!tensor.defined() || tensor.is_meta()) return;
  if (tensor.is_sparse()) {
    use(tensor._indices().storage());
    use(tensor._values().storage());
  } else if (tensor.has_storage()) {
    use(tensor.storage());
  }
}

GRADACCUM_INLINE std::string text_of_system_file(const std::filesystem::path& path) {
  std::string text(std::size_t{1} << 16, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

GRADACCUM_INLINE std::optional<std::int64_t> bytes_after(const std::string& name, const std::string& lines) {
  std::istringstream all(lines);
  for (std::string line; std::getline(all, line);) {
    if (!line.starts_with(name) || line.size() == name.size()) continue;
    if (const char next = line[name.size()]; next != ':' && next != ' ') continue;
    auto rest = plain_stream(line.substr(name.size() + 1));
    std::int64_t number = 0;
    std::string unit;
    if (!(rest >> number) || number < 0 || number > std::int64_t{1} << 50) return std::nullopt;
    return rest >> unit && unit == "kB" ? number * 1024 : number;
  }
  return std::nullopt;
}

/// Parses lines `number:controllers:path`. Version 2 has no controllers, and all groups in one tree; version 1 has a
/// tree for each controller.
GRADACCUM_INLINE std::vector<std::filesystem::path> control_groups(const std::string& groups,
                                                                   const std::string& controller) {
  std::vector<std::filesystem::path> folders;
  std::istringstream lines(groups);
  for (std::string number, controllers, path;
       std::getline(lines, number, ':') && std::getline(lines, controllers, ':') && std::getline(lines, path);) {
    if (!controllers.empty() && (',' + controllers + ',').find(',' + controller + ',') == std::string::npos) continue;
    const std::filesystem::path tree = controllers.empty() ? "" : controller;
    auto group = std::filesystem::path(path).relative_path();
    if (std::ranges::find(group, "..") != group.end()) group.clear();  // outside the mount: counts as the mount itself
    for (; !group.empty(); group = group.parent_path()) folders.push_back(tree / group);
    folders.push_back(tree);
  }
  return folders;
}

/// LibTorch's CPU allocator, except that large blocks are kept.
class KeepingAllocator final : public c10::Allocator {
 public:
  static KeepingAllocator& instance() {
    static auto* const allocator = new KeepingAllocator();  // never destroyed: tensors may be freed after all else
    return *allocator;
  }

  /// If there is no memory, leaves the block to LibTorch, which reports the error.
  c10::DataPtr allocate(std::size_t bytes) override {
    constexpr std::size_t least = std::size_t{1} << 20;
    void* const block = bytes < least ? nullptr : pages_.allocate(bytes);
    if (!block) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  /// Reports the block to the profiler before freeing it, because another block may then get its address.
  static void release(void* block) {
    auto& pages = instance().pages_;
    if (!pages.has(block)) return c10::GetDefaultCPUAllocator()->raw_deleter()(block);
    c10::profiledCPUMemoryReporter().Delete(block);
    pages.free(block);
  }

  PageAllocator pages_;
};

}  // namespace gradaccum::detail

namespace gradaccum {

/// An enclosing meter continues to count.
GRADACCUM_INLINE MemoryMeter::MemoryMeter()
    : ledger_(std::make_shared<detail::MemoryLedger>(detail::MemoryLedger::innermost(
          "MemoryMeter: must not start inside LibTorch's profiler, which uses the same hook"))),
      guard_(c10::DebugInfoKind::PROFILER_STATE, ledger_) {}

GRADACCUM_INLINE std::int64_t MemoryMeter::live_bytes() const { return ledger_->total().live; }
GRADACCUM_INLINE std::int64_t MemoryMeter::live_bytes(c10::Device device) const { return ledger_->of(device).live; }
GRADACCUM_INLINE std::int64_t MemoryMeter::peak_bytes() const { return ledger_->total().peak; }
GRADACCUM_INLINE std::int64_t MemoryMeter::peak_bytes(c10::Device device) const { return ledger_->of(device).peak; }
GRADACCUM_INLINE void MemoryMeter::reset_peak() { ledger_->reset_peak(); }
GRADACCUM_INLINE bool MemoryMeter::possible() { return detail::MemoryLedger::possible(); }

GRADACCUM_INLINE std::optional<std::int64_t> peak_resident_memory() {
  return detail::bytes_after("VmHWM", detail::text_of_system_file("/proc/self/status"));
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  const auto mib = [](std::int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / MiB); };
  out << "budget " << (plan.budget > 0 ? mib(plan.budget) : "not known") << ", gradients " << mib(plan.gradient_bytes)
      << " of it";
  if (plan.checkpoint_budget > 0) out << ", checkpointed parts " << mib(plan.checkpoint_budget);
  out << '\n';
  constexpr std::size_t most = 8;  // sequences have many lengths
  for (std::size_t i = 0; i < std::min(plan.layouts.size(), most); ++i) {
    const auto& layout = plan.layouts[i];
    out << layout.batch << ": " << layout.rows << " rows at once, predicted peak " << mib(layout.predicted_bytes);
    if (layout.measured_bytes > 0) out << ", measured " << mib(layout.measured_bytes);
    out << '\n';
  }
  if (plan.layouts.size() > most) out << "and " << plan.layouts.size() - most << " other layouts\n";
  if (plan.replays > 0) out << plan.replays << " times a batch was begun again with fewer rows\n";
  return out;
}

/// Keeps large blocks unless another allocator is installed. Settings of malloc keep all other blocks.
GRADACCUM_INLINE bool keep_freed_memory() {
  auto& keeping = detail::KeepingAllocator::instance();
  void* const page = detail::map_memory(1);  // null where the system has no such memory
  if (page) detail::unmap({static_cast<std::byte*>(page), 1});
  if (page && c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(&keeping);
  const bool keeps_malloc = detail::keep_memory_of_malloc();
  return c10::GetCPUAllocator() == &keeping || keeps_malloc;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
