// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace gradaccum::detail {

class NcclConnection;

/// The maximum number of ranks of a group. Each rank keeps some kilobytes per other rank.
inline constexpr int most_ranks = 65536;
/// The time that a process waits for others to start before it warns.
inline constexpr std::chrono::milliseconds longest_silence{10000};

/// Detects processes that have ended. A thread of each increments a counter in the store several times a second.
///
/// Gloo reports a closed connection only to the neighbours in a ring, and not which process has ended. The first
/// process that receives the report finds the stopped counter, and writes the failure to the store for all. Gloo does
/// not report a lost link or a suspended process: so once per second rank 0 checks the counters of all others, and they
/// check rank 0's. A waiting process also checks that the store answers its thread, which may hang.
class Heartbeat {
 public:
  /// The time without a beat after which a process counts as dead, long enough for a process on a busy machine.
  static constexpr std::chrono::milliseconds dead_after{30000};

  /// Starts the thread, which must be the only user of `store`. `store_name` locates the store in errors.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string store_name, int rank, int world_size,
            std::chrono::milliseconds timeout = dead_after);
  Heartbeat& operator=(Heartbeat&&) = delete;
  ~Heartbeat();

  /// Waits until `done()` is true or a failure is known. Returns the last result of `done()`. `wake` triggers a check.
  bool wait(const std::function<bool()>& done);
  /// Like wait(), but polls, and gives up after `longest`.
  bool poll(const std::function<bool()>& done, std::chrono::milliseconds longest);
  /// Returns a function that the thread which makes `done()` true must call.
  std::function<void()> wake() const;

  /// Returns true if a failure is known.
  bool failed() const;
  /// Returns the description of the failure by the process that found it first.
  std::string explain();
  /// Reports a failure to all other processes.
  void announce(std::string failure);

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

/// Detects a counter that has stopped for too long. Each call adds at most a second, so that time in which the
/// observing process itself was suspended, or had no processor, does not count.
class StallDetector {
 public:
  explicit StallDetector(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  bool stalled(std::int64_t count) {
    const auto now = Clock::now();
    const auto step = std::min<Clock::duration>(now - std::exchange(last_call_, now), std::chrono::seconds(1));
    stalled_for_ = count == std::exchange(count_, count) ? stalled_for_ + step : Clock::duration::zero();
    return stalled_for_ >= timeout_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  Clock::duration timeout_, stalled_for_ = Clock::duration::zero();
  Clock::time_point last_call_ = Clock::now();
  std::int64_t count_ = -1;
};

/// Returns a contiguous tensor of any dtype as a row of bytes.
inline at::Tensor bytes_of_row(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

/// The connections of this process to all others of its group.
///
/// On each channel, all ranks must issue the same operations in the same order: gradients, which are sent while
/// backward runs, use one channel, and agreements about windows the other. Both use Gloo, which copies device tensors
/// through the host. If each rank's model is on its own CUDA device, gradients use NCCL, but agreements do not, because
/// two NCCL communicators may deadlock.
///
/// Waiting for a process that has ended throws an error that names it. After an error no exchange is possible, since
/// ranks may have received different parts.
class Connections {
 public:
  enum class Channel { gradients, agreement, devices };
  struct Exchange;  ///< an operation in flight
  using Pending = std::shared_ptr<Exchange>;

  /// Connects all ranks. `host` is rank 0's; a loopback address means a single machine. Rank 0 warns if a rank has not
  /// started after `patience`.
  Connections(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host, const std::string& store_name,
              int rank, int world_size, std::chrono::milliseconds timeout,
              std::chrono::milliseconds patience = longest_silence);
  Connections& operator=(Connections&&) = delete;
  /// Abandons the connections after an error: destroying them would wait for operations that may never end.
  ~Connections();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// Blocking operations on dense tensors; see `ProcessGroup`.
  void all_reduce(const at::Tensor& tensor);
  void broadcast(const at::Tensor& tensor, int from);
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor);
  std::vector<std::string> all_gather(const std::string& text);

  /// Returns the channel for gradients of models on these devices (see `device_name`), by rank, and connects NCCL first
  /// if it is used. Must be called on all ranks with the same list.
  Channel connect_devices(const std::vector<std::string>& devices, at::Device own);

  /// Starts an all-reduce in place. Here and in the next three functions, tensors must be contiguous, and must not be
  /// used until `wait`.
  Pending begin_all_reduce(Channel channel, const at::Tensor& tensor);
  Pending begin_broadcast(Channel channel, const at::Tensor& tensor, int from);
  /// Starts a reduce in place to one rank. The other ranks' tensors have undefined contents afterwards.
  Pending begin_reduce(Channel channel, const at::Tensor& tensor, int rank);
  /// Starts an all-to-all: sends each rank its part of `from`, and receives the parts for this rank in `to`. Both are
  /// rows of elements in rank order, and the sizes are the numbers of elements for each rank.
  Pending begin_all_to_all(Channel channel, const at::Tensor& to, const at::Tensor& from,
                           std::vector<std::int64_t> sizes_to, std::vector<std::int64_t> sizes_from);
  /// Waits for an operation. `what` describes it in errors, as in "the gradients of a window".
  void wait(const Pending& pending, const std::string& what);

  /// Throws if another accumulator's window is being sent: ranks could send the two in different orders.
  void begin_exchange(const void* exchange);
  void end_exchange(const void* exchange) {
    if (exchange_ == exchange) exchange_ = nullptr;
  }

  void check_usable() const;
  /// Reports to the other ranks that this rank failed during an exchange.
  void give_up(const std::string& why);

 private:
  /// Waits until all ranks have reached this point, which errors name, as in "to start".
  void meet(const std::string& point, std::chrono::milliseconds patience);
  Pending begin(Channel channel, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const;
  [[noreturn]] void fail(const std::string& why, const std::string& what);

  int rank_, world_size_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<NcclConnection> nccl_;  // destroyed after Gloo's, whose end informs other ranks
  std::vector<std::string> devices_;      // the devices that NCCL connects, by rank
  c10::intrusive_ptr<c10d::Backend> gradients_, agreement_;
  Heartbeat heartbeat_;
  std::string failure_;
  const void* exchange_ = nullptr;  // the exchange whose gradients are in flight
};

/// Returns true if each rank has a device, and no two ranks share one, which NCCL rejects.
bool each_has_its_own(const std::vector<std::string>& devices);

/// Returns the machine and the CUDA device of all these tensors; "" if they are not on a single one, or without NCCL.
std::string device_name(const std::vector<at::Tensor>& tensors);

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

/// Returns this machine's address on the route to a host; "" if there is none.
std::string address_towards(const std::string& host);

/// Returns the address by which other machines reach this one: by its name; if that is a loopback address, as on
/// Debian, on the route to rank 0's `host`; on rank 0's machine, on the route to another of the first `ranks` ranks.
/// All ranks must call it.
std::string reachable_address(c10d::Store& store, const std::string& name, const std::string& host, int rank,
                              int ranks);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/connections.ipp>
#endif
