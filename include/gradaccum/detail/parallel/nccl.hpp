// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>)
#define GRADACCUM_HAS_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>

namespace gradaccum::detail {

#ifdef GRADACCUM_HAS_NCCL
constexpr bool built_with_nccl = true;

inline bool has_device(int index) { return index < c10::cuda::device_count(); }

/// Connections between the devices of all ranks, one of its own each. Waits in `store` for others, which is this one's
/// alone.
inline c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::string& name, int rank, int world_size,
                                                      std::chrono::milliseconds timeout) {
  constexpr auto header = static_cast<std::uint64_t>(NCCL_MAJOR) << 32 | static_cast<std::uint64_t>(NCCL_MINOR) << 16;
  const auto present = torch::cuda::nccl::version() & ~std::uint64_t{0xffff};
  TORCH_CHECK(header == present, "ProcessGroup: this program was built with the nccl.h of NCCL ", NCCL_MAJOR, ".",
              NCCL_MINOR, ", but LibTorch has ", present >> 32, ".", (present >> 16) & 0xffff,
              "; build it with the header of that version (CMake: -DNCCL_ROOT=...)");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>(name, store), rank,
                                                     world_size, options);
}
#undef GRADACCUM_HAS_NCCL
#else
constexpr bool built_with_nccl = false;

inline bool has_device(int) { return false; }
inline c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>&, const std::string&, int,
                                                      int, std::chrono::milliseconds) {
  return {};
}
#endif

/// What LibTorch wants to be told before the destructor. A device that has failed already has an error to tell of it.
inline void shut_down(const c10::intrusive_ptr<c10d::Backend>& nccl) noexcept {
  try {
    if (nccl) nccl->shutdown();
  } catch (const std::exception&) {
  }
}

}  // namespace gradaccum::detail
