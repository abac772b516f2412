// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace emulated_cuda {

inline constexpr c10::DeviceIndex number_of_devices = 2;
inline constexpr std::size_t bytes_of_a_device = std::size_t{8} << 30;

/// The addresses of the devices' memory. They are reserved but cannot be read or written, so that a host which takes
/// a device's pointer for its own faults. The bytes are elsewhere, at a fixed distance, where the emulation works.
class AddressRange {
 public:
  static const AddressRange& get();

  char* begin_of(c10::DeviceIndex device) const {
    return device_ + static_cast<std::size_t>(device) * bytes_of_a_device;
  }
  bool contains(const void* address) const { return address >= device_ && address < device_ + size; }
  c10::DeviceIndex device_of(const void* address) const;
  /// Where the bytes at a device's address are.
  char* host(const void* address) const;
  /// Gives pages back to the operating system; then they hold zeros.
  void release(char* address, std::size_t bytes) const;

 private:
  AddressRange();
  static constexpr std::size_t size = bytes_of_a_device * number_of_devices;

  char* device_;
  char* host_;
};

}  // namespace emulated_cuda
