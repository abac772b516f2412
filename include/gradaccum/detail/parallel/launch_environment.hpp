// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// Which process this is of those that a launcher started, and where they meet.
struct LaunchEnvironment {
  int rank = 0, world_size = 1, local_rank = 0;
  std::string address;
  std::uint16_t port = 0;
  bool launcher_has_store = false;  ///< torchrun keeps one at that address; else rank 0 does
  std::string attempt;              ///< torchrun starts all again: what an earlier attempt left is not ours
};

/// Reads it from the variables that torchrun (Kubeflow, and many others), Slurm's srun, or Open MPI's mpirun set.
class LaunchEnvironmentReader {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;

  explicit LaunchEnvironmentReader(Lookup lookup = of_this_process) : lookup_(std::move(lookup)) {}

  /// One process, where none of them has started it.
  LaunchEnvironment read() const {
    LaunchEnvironment environment;
    for (auto& names : launchers)
      if (lookup_(names.world_size)) return read(names);
    TORCH_CHECK(!lookup_("RANK"), "ProcessGroup: the environment has RANK without WORLD_SIZE; set both, or neither");
    return environment;
  }

  static std::optional<std::string> of_this_process(const std::string& variable) {
    const char* const value = std::getenv(variable.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  }

 private:
  /// Slurm sets those of a step in what srun starts, and not in a batch script.
  struct Names {
    const char *rank, *world_size, *local_rank;
  };
  static constexpr std::array<Names, 3> launchers{{
      {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
      {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
  }};

  LaunchEnvironment read(const Names& names) const {
    LaunchEnvironment environment;
    environment.world_size = static_cast<int>(number(names.world_size, 1, std::numeric_limits<int>::max()));
    environment.rank = static_cast<int>(number(names.rank, 0, environment.world_size - 1));
    if (lookup_(names.local_rank))
      environment.local_rank = static_cast<int>(number(names.local_rank, 0, environment.rank));
    else
      environment.local_rank = environment.rank;
    if (environment.world_size == 1) return environment;
    environment.address = address();
    environment.port = port();
    environment.launcher_has_store = lookup_("TORCHELASTIC_USE_AGENT_STORE") == "True";
    environment.attempt = lookup_("TORCHELASTIC_RESTART_COUNT").value_or("0");
    return environment;
  }

  std::string address() const {
    if (auto address = lookup_("MASTER_ADDR")) return *address;
    if (auto nodes = lookup_("SLURM_STEP_NODELIST")) return first_host(*nodes);
    TORCH_CHECK(false, "ProcessGroup: the environment must have MASTER_ADDR, the host of rank 0, and has not");
  }

  std::uint16_t port() const {
    if (const auto job = lookup_("SLURM_JOB_ID"); job && !lookup_("MASTER_PORT"))
      return static_cast<std::uint16_t>(15000 +
                                        number("SLURM_JOB_ID", 0, std::numeric_limits<std::int64_t>::max()) % 20000);
    return static_cast<std::uint16_t>(number("MASTER_PORT", 1, 65535));
  }

  /// `node[07-09,12],other` has node07 first.
  static std::string first_host(std::string_view nodes) {
    const auto bracket = nodes.find('[');
    if (bracket == nodes.npos || nodes.find(',') < bracket) return std::string(nodes.substr(0, nodes.find(',')));
    const auto number = nodes.substr(bracket + 1);
    return std::string(nodes.substr(0, bracket)).append(number.substr(0, number.find_first_of("-,]")));
  }

  std::int64_t number(const char* variable, std::int64_t least, std::int64_t most) const {
    const auto text = lookup_(variable);
    TORCH_CHECK(text, "ProcessGroup: the environment must have ", variable, ", and has not");
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    TORCH_CHECK(error == std::errc() && end == text->data() + text->size() && least <= value && value <= most,
                "ProcessGroup: the environment's ", variable, " must be a number from ", least, " to ", most, ", got '",
                *text, "'");
    return value;
  }

  Lookup lookup_;
};

}  // namespace gradaccum::detail
