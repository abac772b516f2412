// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/launch_environment.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE LaunchEnvironmentReader::LaunchEnvironmentReader(Lookup lookup) : lookup_(std::move(lookup)) {}

GRADACCUM_INLINE LaunchEnvironment LaunchEnvironmentReader::read() const {
  static constexpr Names launchers[] = {
      {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
      // Slurm sets a step's variables in processes that srun starts, but not in a batch script.
      {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
  };
  for (auto& names : launchers)
    if (lookup_(names.world_size)) return read(names);
  TORCH_CHECK(!lookup_("RANK"), "ProcessGroup: the environment has RANK without WORLD_SIZE; set both, or neither");
  return {};
}

GRADACCUM_INLINE std::optional<std::string> LaunchEnvironmentReader::of_this_process(const std::string& variable) {
  const char* const value = std::getenv(variable.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

GRADACCUM_INLINE LaunchEnvironment LaunchEnvironmentReader::read(const Names& names) const {
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

/// Returns the first host of a Slurm node list: node07 for `node[07-09,12],other`.
GRADACCUM_INLINE std::string first_host(std::string_view nodes) {
  const auto bracket = nodes.find('[');
  if (bracket == nodes.npos || nodes.find(',') < bracket) return std::string(nodes.substr(0, nodes.find(',')));
  const auto number = nodes.substr(bracket + 1);
  return std::string(nodes.substr(0, bracket)).append(number.substr(0, number.find_first_of("-,]")));
}

GRADACCUM_INLINE std::string LaunchEnvironmentReader::address() const {
  if (auto address = lookup_("MASTER_ADDR")) return *address;
  if (auto nodes = lookup_("SLURM_STEP_NODELIST")) return first_host(*nodes);
  TORCH_CHECK(false, "ProcessGroup: the environment must have MASTER_ADDR, the host of rank 0, and has not");
}

GRADACCUM_INLINE std::uint16_t LaunchEnvironmentReader::port() const {
  if (const auto job = lookup_("SLURM_JOB_ID"); job && !lookup_("MASTER_PORT"))
    return static_cast<std::uint16_t>(15000 +
                                      number("SLURM_JOB_ID", 0, std::numeric_limits<std::int64_t>::max()) % 20000);
  return static_cast<std::uint16_t>(number("MASTER_PORT", 1, 65535));
}

GRADACCUM_INLINE std::int64_t LaunchEnvironmentReader::number(const char* variable, std::int64_t least,
                                                              std::int64_t most) const {
  const auto text = lookup_(variable);
  TORCH_CHECK(text, "ProcessGroup: the environment must have ", variable, ", and has not");
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TORCH_CHECK(error == std::errc() && end == text->data() + text->size() && least <= value && value <= most,
              "ProcessGroup: the environment's ", variable, " must be a number from ", least, " to ", most, ", got '",
              *text, "'");
  return value;
}

}  // namespace gradaccum::detail
