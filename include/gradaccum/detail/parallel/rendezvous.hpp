// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace gradaccum::detail {

/// This process's rank among the processes of a launcher, and their rendezvous.
struct LaunchEnvironment {
  int rank = 0, world_size = 1;
  int local_rank = 0;  ///< -1 if the launcher does not set it
  std::string address;
  std::uint16_t port = 0;
  bool launcher_has_store = false;  ///< true if torchrun has a store at that address; otherwise rank 0 opens one
  std::string attempt;              ///< torchrun's restart count: separates the store's keys by attempt
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& variable)>;

/// Reads the variables of the innermost launcher, such as torchrun in a Slurm step. Without a launcher, the world size
/// is 1.
LaunchEnvironment launch_environment(const EnvironmentLookup& lookup);

/// Opens rank 0's store, or connects to it or to the launcher's. `name` describes the store in errors. Warns if this
/// takes longer than `patience`. Other machines can connect to rank 0's store unless its address is a loopback one.
c10::intrusive_ptr<c10d::Store> open_store(const LaunchEnvironment& environment, const std::string& name,
                                           std::chrono::milliseconds timeout,
                                           std::chrono::milliseconds patience = longest_silence);

/// Returns the number of lower ranks on this host, by the names that all ranks have put into the store.
int local_rank_by_host(c10d::Store& store, int rank, const std::string& host);

c10::DeviceIndex device_index(int local_rank, int devices);

/// Returns the store's key of a rank's host name.
std::string host_key(int rank);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/rendezvous.ipp>
#endif
