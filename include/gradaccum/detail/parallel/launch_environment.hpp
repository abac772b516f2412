// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace gradaccum::detail {

/// This process's rank among those that a launcher started, and their rendezvous.
struct LaunchEnvironment {
  int rank = 0, world_size = 1, local_rank = 0;
  std::string address;
  std::uint16_t port = 0;
  bool launcher_has_store = false;  ///< torchrun has a store at that address; otherwise rank 0 has
  std::string attempt;              ///< torchrun's restart count: separates the store's keys by attempt
};

/// Reads the variables of torchrun (Kubeflow, and many others), Slurm's srun, or Open MPI's mpirun.
class LaunchEnvironmentReader {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;

  explicit LaunchEnvironmentReader(Lookup lookup = of_this_process);

  /// Returns a world of one process if no launcher has started it.
  LaunchEnvironment read() const;

  static std::optional<std::string> of_this_process(const std::string& variable);

 private:
  struct Names {
    const char *rank, *world_size, *local_rank;
  };

  LaunchEnvironment read(const Names& names) const;
  std::string address() const;
  std::uint16_t port() const;
  std::int64_t number(const char* variable, std::int64_t least, std::int64_t most) const;

  Lookup lookup_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/launch_environment.ipp>
#endif
