// SPDX-License-Identifier: Apache-2.0
#include "address_range.hpp"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

namespace emulated_cuda {
namespace {

char* reserve(std::size_t bytes, int protection) {
  void* const address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "emulated CUDA: cannot reserve ", bytes, " bytes of addresses");
  return static_cast<char*>(address);
}

}  // namespace

AddressRange::AddressRange() : device_(reserve(size, PROT_NONE)), host_(reserve(size, PROT_READ | PROT_WRITE)) {}

const AddressRange& AddressRange::get() {
  static const AddressRange range;
  return range;
}

c10::DeviceIndex AddressRange::device_of(const void* address) const {
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - device_);
  return static_cast<c10::DeviceIndex>(offset / bytes_of_a_device);
}

char* AddressRange::host(const void* address) const {
  if (!address) return nullptr;
  TORCH_CHECK(contains(address), "emulated CUDA: ", address, " is not an address of a device");
  return host_ + (static_cast<const char*>(address) - device_);
}

/// Releases only the pages that these bytes fill; others may hold memory in use.
void AddressRange::release(char* address, std::size_t bytes) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const auto offset = static_cast<std::size_t>(host(address) - host_);
  const auto begin = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
  if (begin < end) madvise(host_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace emulated_cuda
