// SPDX-License-Identifier: Apache-2.0
#include "address_range.hpp"
#include "allocators.hpp"
#include "device_memory.hpp"
#include "streams.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <array>
#include <cstring>
#include <utility>

namespace emulated_cuda {
namespace {

void free_block(void* block) {
  if (block) DeviceMemory::of(AddressRange::get().device_of(block)).free(static_cast<char*>(block));
}

c10::DataPtr device_pointer(void* block, c10::DeviceIndex device) {
  return {block, block, &free_block, c10::Device(c10::kCUDA, device)};
}

constexpr std::size_t bytes_of_a_context = std::size_t{128} << 20;  // memory that the driver uses

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
using AllocatorOfDevices = c10::DeviceAllocator;
#else
/// Older versions of LibTorch have no class for it.
struct AllocatorOfDevices : c10::Allocator {
  virtual bool initialized() = 0;
};
#endif

class Allocator final : public AllocatorOfDevices {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device = current_device();
    return device_pointer(DeviceMemory::of(device).allocate(bytes), device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(AddressRange::get().host(to), AddressRange::get().host(from), bytes);
  }

  bool initialized() override { return DeviceMemory::of(0).touched() || DeviceMemory::of(1).touched(); }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (c10::DeviceIndex device = 0; device < number_of_devices; ++device)
      DeviceMemory::of(device).release_free_pages();
  }
  void recordStream(const c10::DataPtr& /*pointer*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    TORCH_CHECK(initialized(), "Allocator not initialized for device ", static_cast<int>(device),
                ": did you call init?");
    return DeviceMemory::of(device).statistics();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { DeviceMemory::of(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { DeviceMemory::of(device).reset_peak(); }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto& memory = DeviceMemory::of(device);
    const auto reserved = static_cast<std::size_t>(memory.statistics().reserved_bytes[0].current);
    return {bytes_of_a_device - reserved - (memory.touched() ? bytes_of_a_context : 0), bytes_of_a_device};
  }
#endif
};

class HostViewAllocator final : public c10::Allocator {
 public:
  explicit HostViewAllocator(c10::DeviceIndex device) : device_(device) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = DeviceMemory::of(device_).allocate(bytes);
    return {AddressRange::get().host(block), block, &free_block, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  c10::DeviceIndex device_;
};

[[maybe_unused]] const bool registered = (c10::SetAllocator(c10::kCUDA, &device_allocator()), true);

}  // namespace

c10::Allocator& device_allocator() {
  static auto& allocator = *new Allocator;
  return allocator;
}

c10::Allocator& host_view_allocator(c10::DeviceIndex device) {
  static auto& allocators = *new std::array{HostViewAllocator(0), HostViewAllocator(1)};
  return allocators.at(static_cast<std::size_t>(device));
}

c10::DataPtr as_device_pointer(c10::DataPtr host_view) {
  void* const block = host_view.release_context();
  return device_pointer(block, block ? AddressRange::get().device_of(block) : current_device());
}

}  // namespace emulated_cuda
