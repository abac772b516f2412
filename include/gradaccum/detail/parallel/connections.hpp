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

/// The most ranks of a group. Each keeps some kilobytes for each other.
inline constexpr int most_ranks = 65536;
/// The time that a process waits for others to start without a word.
inline constexpr std::chrono::milliseconds longest_silence{10000};

/// Detects processes that have ended. A thread of each increments a counter in the store several times a second.
///
/// Gloo reports a closed connection only to the neighbours in a ring, and not which process has ended. The first to
/// notice finds the counter that has stopped, and writes the failure to the store for all. Gloo does not report a lost
/// link or a suspended process at all: so once a second rank 0 checks the counters of all others, and they check its
/// own. A waiting process also checks that the store answers its thread, which may hang.
class Heartbeat {
 public:
  /// The time without a beat after which a process counts as dead. One on a busy machine still counts in time.
  static constexpr std::chrono::milliseconds dead_after{30000};

  /// Starts the thread, which must be the only user of `store`. `store_name` locates the store in errors.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string store_name, int rank, int world_size,
            std::chrono::milliseconds timeout = dead_after);
  Heartbeat& operator=(Heartbeat&&) = delete;
  ~Heartbeat();

  /// Waits until `done()` is true or a failure is known, and returns the former. `wake` triggers a check.
  bool wait(const std::function<bool()>& done);
  /// Like wait(), but polls, and gives up after `longest`.
  bool poll(const std::function<bool()>& done, std::chrono::milliseconds longest);
  /// Returns a function for the thread that makes `done()` true.
  std::function<void()> wake() const;

  /// True if a failure is known.
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

/// Detects a counter that has stopped for too long. Each call adds at most a second, so that time in which the observer
/// itself was suspended, or got no processor, does not count.
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
/// On each, all ranks must issue the same operations in the same order: gradients, which are sent while backward runs,
/// use one, and agreements about windows the other. Gloo carries both, and copies device tensors through the host. If
/// each rank's model is on its own CUDA device, gradients alone use NCCL: two NCCL communicators may deadlock.
///
/// A wait for a process that has ended throws an error that names it. After an error nothing can be exchanged any more,
/// since it is unknown what has arrived where.
class Connections {
 public:
  enum class Channel { gradients, agreement, devices };
  struct Exchange;  ///< an operation in flight
  using Pending = std::shared_ptr<Exchange>;

  /// Connects all ranks. A loopback `host`, which is rank 0's, means one machine. Rank 0 warns if one has not started
  /// after `patience`.
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
  /// if that is used. Must be called on all ranks with equal devices.
  Channel connect_devices(const std::vector<std::string>& devices, at::Device own);

  /// Starts an all-reduce in place. Tensors of this and the next three must be contiguous, and unused until `wait`.
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
  /// Reports to the other ranks that this process failed in the middle of an exchange.
  void give_up(const std::string& why);

 private:
  /// Waits until all ranks have come to this point, as in "to start".
  void meet(const std::string& point, std::chrono::milliseconds patience);
  Pending begin(Channel channel, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const;
  [[noreturn]] void fail(const std::string& why, const std::string& what);

  int rank_, world_size_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<NcclConnection> nccl_;  // ends after the others, whose end shows other ranks that this one has ended
  std::vector<std::string> devices_;      // those that NCCL connects, by rank
  c10::intrusive_ptr<c10d::Backend> gradients_, agreement_;
  Heartbeat heartbeat_;
  std::string failure_;
  const void* exchange_ = nullptr;  // the exchange whose gradients are in flight
};

/// True if each rank has a device, and no two share one, which NCCL refuses.
bool each_has_its_own(const std::vector<std::string>& devices);

/// Returns the machine and the CUDA device of all these tensors; "" if they are not on one, or there is no NCCL.
std::string device_name(const std::vector<at::Tensor>& tensors);

/// This process's rank among those that a launcher started, and their rendezvous.
struct LaunchEnvironment {
  int rank = 0, world_size = 1;
  int local_rank = 0;  ///< -1 if the launcher does not tell it
  std::string address;
  std::uint16_t port = 0;
  bool launcher_has_store = false;  ///< torchrun has a store at that address; otherwise rank 0 has
  std::string attempt;              ///< torchrun's restart count: separates the store's keys by attempt
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& variable)>;

/// Reads the variables of the innermost launcher, such as torchrun in a Slurm step. Without one, the world is a
/// process.
LaunchEnvironment launch_environment(const EnvironmentLookup& lookup);

/// Opens rank 0's store, or connects to it or to the launcher's, which `name` describes. Warns if that takes longer
/// than `patience`. Rank 0's store is open to other machines, unless the address is a loopback one.
c10::intrusive_ptr<c10d::Store> open_store(const LaunchEnvironment& environment, const std::string& name,
                                           std::chrono::milliseconds timeout,
                                           std::chrono::milliseconds patience = longest_silence);

/// Returns the number of lower ranks on this host, by the names that all ranks have put into the store.
int local_rank_by_host(c10d::Store& store, int rank, const std::string& host);

c10::DeviceIndex device_index(int local_rank, int devices);

/// Returns this machine's address on its way to a host; "" if there is none.
std::string address_towards(const std::string& host);

/// Returns the address by which other machines reach this one: that of its own name or, as Debian gives the name a
/// loopback address, that on the way to rank 0's `host` or, on rank 0's machine, to another of `ranks`; 0 asks nobody.
/// All ranks must call it.
std::string reachable_address(c10d::Store& store, const std::string& name, const std::string& host, int rank,
                              int ranks);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/connections.ipp>
#endif
