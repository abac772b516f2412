// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace emulated_cuda {

inline constexpr c10::DeviceIndex number_of_devices = 2;
inline constexpr std::size_t bytes_of_a_device = std::size_t{8} << 30;

/// The addresses of the devices' memory, reserved without access, so that a host that dereferences a device's pointer
/// faults. The bytes are at a fixed distance, where the emulation accesses them.
class AddressRange {
 public:
  static const AddressRange& get();

  char* begin_of(c10::DeviceIndex device) const {
    return device_ + static_cast<std::size_t>(device) * bytes_of_a_device;
  }
  bool contains(const void* address) const { return address >= device_ && address < device_ + size; }
  c10::DeviceIndex device_of(const void* address) const;
  /// Returns the host address of the bytes at a device's address.
  char* host(const void* address) const;
  /// Returns pages to the operating system; then they hold zeros.
  void release(char* address, std::size_t bytes) const;

 private:
  AddressRange();
  static constexpr std::size_t size = bytes_of_a_device * number_of_devices;

  char* device_;
  char* host_;
};

}  // namespace emulated_cuda
