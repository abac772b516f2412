// SPDX-License-Identifier: Apache-2.0
// Reads a launcher's environment, and opens the store in which ranks meet.
#pragma once

#include <gradaccum/detail/parallel/rendezvous.hpp>

#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/platform/sockets.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <exception>
#include <future>
#include <limits>
#include <string_view>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::int64_t environment_number(const EnvironmentLookup& lookup, const char* variable,
                                                 std::int64_t least, std::int64_t most) {
  const auto text = lookup(variable);
  TORCH_CHECK(text, "ProcessGroup: the environment must set ", variable, ", but does not");
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TORCH_CHECK(error == std::errc() && end == text->data() + text->size() && least <= value && value <= most,
              "ProcessGroup: the environment's ", variable, " must be a number from ", least, " to ", most, ", got '",
              *text, "'");
  return value;
}

/// Returns the first host of a Slurm node list: node07 for `node[07-09,12],other`.
GRADACCUM_INLINE std::string first_host(std::string_view nodes) {
  const auto bracket = nodes.find('[');
  if (bracket == nodes.npos || nodes.find(',') < bracket) return std::string(nodes.substr(0, nodes.find(',')));
  const auto number = nodes.substr(bracket + 1);
  return std::string(nodes.substr(0, bracket)).append(number.substr(0, number.find_first_of("-,]")));
}

GRADACCUM_INLINE LaunchEnvironment launch_environment(const EnvironmentLookup& lookup) {
  struct Launcher {
    const char *rank, *world_size;
    std::vector<const char*> local_rank;
  };
  // Slurm is last, as it also starts the daemons of mpirun, one a machine, whose processes have their variables.
  static const Launcher launchers[] = {
      {"RANK", "WORLD_SIZE", {"LOCAL_RANK"}},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"OMPI_COMM_WORLD_LOCAL_RANK"}},
      {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", {"MV2_COMM_WORLD_LOCAL_RANK"}},
      {"MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", {"MVP_COMM_WORLD_LOCAL_RANK"}},
      {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", {"JSM_NAMESPACE_LOCAL_RANK"}},
      {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", {"FLUX_TASK_LOCAL_ID"}},
      {"PMI_RANK", "PMI_SIZE", {"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"}},
      {"PALS_RANKID", "PMI_SIZE", {"PALS_LOCAL_RANKID"}},
      {"PMIX_RANK", "WORLD_SIZE", {"PMIX_LOCAL_RANK"}},
      {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", {"SLURM_LOCALID"}},
  };
  const auto number = [&](const char* variable, std::int64_t least, std::int64_t most) {
    return static_cast<int>(environment_number(lookup, variable, least, most));
  };
  LaunchEnvironment environment;
  const auto has = [&](const char* variable) { return lookup(variable).has_value(); };
  const auto* const found =
      std::ranges::find_if(launchers, [&](auto& one) { return has(one.rank) && has(one.world_size); });
  const auto* const slurm = std::prev(std::end(launchers));
  if (found == std::end(launchers)) {
    for (auto& one : launchers)  // but a Slurm batch script has a rank, and is alone
      TORCH_CHECK(has(one.rank) == has(one.world_size) || &one == slurm, "ProcessGroup: the environment has ",
                  has(one.rank) ? one.rank : one.world_size, " without ", has(one.rank) ? one.world_size : one.rank,
                  "; set both, or neither");
    TORCH_CHECK(!has("MASTER_ADDR"),
                "ProcessGroup: the environment has MASTER_ADDR, but no launcher that is known has set the rank of this "
                "process; set RANK and WORLD_SIZE for each process, or, to train alone, unset MASTER_ADDR");
    return environment;
  }
  environment.world_size = number(found->world_size, 1, most_ranks);
  environment.rank = number(found->rank, 0, environment.world_size - 1);
  if (environment.world_size == 1) return environment;
  environment.local_rank = -1;
  for (const auto* const variable : found->local_rank)
    if (environment.local_rank < 0 && lookup(variable)) environment.local_rank = number(variable, 0, environment.rank);
  if (const auto address = lookup("MASTER_ADDR")) {
    environment.address = *address;
  } else {
    const bool by_step = lookup(slurm->rank) == lookup(found->rank) &&            // not a daemon's
                         lookup(slurm->world_size) == lookup(found->world_size);  // srun sets PMI_RANK, too
    const auto nodes = by_step ? lookup("SLURM_STEP_NODELIST") : std::nullopt;
    TORCH_CHECK(nodes, "ProcessGroup: the environment must set MASTER_ADDR to the host of rank 0, but does not");
    environment.address = first_host(*nodes);
  }
  TORCH_CHECK(!environment.address.empty(), "ProcessGroup: MASTER_ADDR must be the host of rank 0, got ''");
  const bool by_job = lookup("SLURM_JOB_ID") && !lookup("MASTER_PORT");
  const auto most = std::numeric_limits<std::int64_t>::max();
  const auto port =
      by_job ? 15000 + environment_number(lookup, "SLURM_JOB_ID", 0, most) % 20000 : number("MASTER_PORT", 1, 65535);
  environment.port = static_cast<std::uint16_t>(port);
  environment.launcher_has_store = lookup("TORCHELASTIC_USE_AGENT_STORE") == "True";
  environment.attempt = lookup("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return environment;
}

/// Warns, by this thread's handler, if it lives longer than `patience`.
class LongWait {
 public:
  LongWait(std::chrono::milliseconds patience, std::string text) {
    auto warn = [patience, text = std::move(text), over = over_.get_future(),
                 handler = c10::WarningUtils::get_warning_handler()] {
      const c10::WarningUtils::WarningHandlerGuard guard(handler);
      if (over.wait_for(patience) == std::future_status::timeout) TORCH_WARN(text);
    };
    thread_ = starting_thread("ProcessGroup", [&] { return std::thread(std::move(warn)); });
  }
  LongWait& operator=(LongWait&&) = delete;
  ~LongWait() {
    over_.set_value();
    thread_.join();
  }

 private:
  std::promise<void> over_;
  std::thread thread_;
};

GRADACCUM_INLINE c10::intrusive_ptr<c10d::Store> open_store(const LaunchEnvironment& environment,
                                                            const std::string& name, std::chrono::milliseconds timeout,
                                                            std::chrono::milliseconds patience) {
  c10d::TCPStoreOptions options;
  options.port = environment.port;
  options.isServer = environment.rank == 0 && !environment.launcher_has_store;
  options.numWorkers = environment.world_size;
  options.waitWorkers = false;  // Connections waits
  options.multiTenant = true;   // allows a second group in this process
  options.timeout = timeout;
  const auto who = c10::str("ProcessGroup: rank ", environment.rank);
  const LongWait wait(patience, c10::str(who, " has not reached ", name, " after ", in_seconds(patience),
                                         ": it has not started or has ended, MASTER_ADDR does not lead to it, or "
                                         "another program has its port; rank ",
                                         environment.rank, " gives up after ", in_seconds(timeout)));
  // LibTorch's own socket is open to other machines. It also gives clients of IPv4 an address of IPv6, which is not in
  // /etc/hosts: then the store's only thread asks DNS for the name of each that connects, which may take seconds.
  const bool on_loopback = options.isServer && is_loopback(environment.address);
  const int own = on_loopback ? listening_socket(environment.address, environment.port) : -1;
  if (own >= 0) options.masterListenFd = own;
  return starting_thread("ProcessGroup", [&]() -> c10::intrusive_ptr<c10d::Store> {
    try {
      return c10::make_intrusive<c10d::TCPStore>(environment.address, options);
    } catch (const c10::Error& error) {
      const auto text = first_line(error.what());
      TORCH_CHECK(text.find("EADDRINUSE") == text.npos, who, " must open its store at port ", environment.port,
                  ", which another program uses; set another MASTER_PORT");
      TORCH_CHECK(false, who, " could not reach ", name, ": ", text);
    }
  });
}

GRADACCUM_INLINE std::string host_key(int rank) { return "host/" + std::to_string(rank); }

GRADACCUM_INLINE int local_rank_by_host(c10d::Store& store, int rank, const std::string& host) {
  int lower = 0;
  for (int other = 0; other < rank; ++other) {
    try {
      lower += store.get_to_str(host_key(other)) == host;
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "ProcessGroup: rank ", other, " could not be reached by rank ", rank,
                  ": it has not started or has ended: ", first_line(error.what()));
    }
  }
  return lower;
}

GRADACCUM_INLINE c10::DeviceIndex device_index(int local_rank, int devices) {
  TORCH_CHECK(local_rank < devices, "ProcessGroup: local rank ", local_rank,
              " must have a CUDA device of its own, but this process sees only ", devices,
              "; start no more processes on a machine than it has devices, or use torch::Device(torch::kCUDA, 0) if "
              "the launcher shows each process only its own");
  return static_cast<c10::DeviceIndex>(local_rank);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
