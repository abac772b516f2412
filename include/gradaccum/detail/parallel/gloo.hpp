// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#if defined(USE_C10D_GLOO) && __has_include(<gloo/context.h>)
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

#include <chrono>
#include <cstdlib>
#include <string>

namespace gradaccum::detail {

/// Connections of all ranks with all others, by LibTorch's own Gloo. They meet in `store`, under `name`.
///
/// `host` is where rank 0 is, and tells whether all are on this machine; GLOO_SOCKET_IFNAME names the network interface
/// where the machine's own name does not lead to the right one.
inline c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::string& name, const std::string& host, int rank,
                                                      int world_size, std::chrono::milliseconds timeout) {
#if defined(USE_C10D_GLOO) && __has_include(<gloo/context.h>)
  using Gloo = c10d::ProcessGroupGloo;
  const auto options = Gloo::Options::create(timeout);
  const bool local = host == "127.0.0.1" || host == "localhost" || host == "::1";
  if (const char* const interface = std::getenv("GLOO_SOCKET_IFNAME"); interface != nullptr)
    options->devices.push_back(Gloo::createDeviceForInterface(interface));
  else if (local)
    options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  else
    options->devices.push_back(Gloo::createDefaultDevice());
  return c10::make_intrusive<Gloo>(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, world_size, options);
#else
  static_cast<void>(store), static_cast<void>(name), static_cast<void>(host);
  static_cast<void>(rank), static_cast<void>(world_size), static_cast<void>(timeout);
  TORCH_CHECK(false,
              "ProcessGroup: this program was built without Gloo: it needs a LibTorch that has it, USE_C10D_GLOO "
              "defined, and include/gradaccum_gloo among the include directories; the CMake target "
              "gradaccum::gradaccum sees to the last two");
#endif
}

}  // namespace gradaccum::detail
