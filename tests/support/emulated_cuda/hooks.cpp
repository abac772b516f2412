// SPDX-License-Identifier: Apache-2.0
#include "address_range.hpp"
#include "allocators.hpp"
#include "counts.hpp"
#include "device_memory.hpp"
#include "generator.hpp"
#include "streams.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

namespace emulated_cuda {
namespace {

c10::DeviceIndex or_current(c10::DeviceIndex device) { return device < 0 ? current_device() : device; }

/// The functions that LibTorch's CPU library calls in CUDA's. LibTorch looks for a class of this name.
class CUDAHooks final : public at::CUDAHooksInterface {
 public:
  explicit CUDAHooks(at::CUDAHooksArgs /*none*/) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return DeviceMemory::of(device).touched(); }

  int getNumGPUs() const override { return number_of_devices; }
  c10::DeviceIndex deviceCount() const override { return number_of_devices; }
  c10::DeviceIndex current_device() const override { return emulated_cuda::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return emulated_cuda::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = emulated_cuda::current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex /*device*/) const override { wait(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return DeviceGenerator::of(or_current(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(or_current(device));
  }

  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(AddressRange::get().contains(data), "The specified pointer resides on host memory.");
    return {c10::kCUDA, AddressRange::get().device_of(data)};
  }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  std::string showConfig() const override { return "emulated CUDA\n"; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
}  // namespace emulated_cuda
