// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace gradaccum::detail {

struct LaunchEnvironment;
class NcclConnection;

/// Returns a contiguous tensor of any dtype as a row of bytes.
inline at::Tensor bytes_of_row(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

/// The connections of this process to all others of its group.
///
/// There are two: on each, all ranks must issue the same operations in the same order, so gradients, which are sent
/// while backward runs, use one, and agreements about windows use the other.
///
/// Gloo carries both, and copies device tensors through the host. If each rank's model is on its own CUDA device,
/// gradients use NCCL, and nothing else does: two NCCL communicators may deadlock.
///
/// A wait for a process that has ended throws an error that names it. After an error nothing can be exchanged any more,
/// since it is unknown what has arrived where.
class Connections {
 public:
  enum class Channel { gradients, agreement, devices };
  struct Exchange;  ///< an operation in flight
  using Pending = std::shared_ptr<Exchange>;

  /// Connects all ranks. A loopback `host`, which is rank 0's, means one machine. `place` locates the store in errors.
  Connections(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host, const std::string& place, int rank,
              int world_size, std::chrono::milliseconds timeout);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;
  /// Abandons the connections after an error: destroying them would wait for operations that may never end.
  ~Connections();
  static std::shared_ptr<Connections> connect(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// Blocking operations on dense tensors; see `ProcessGroup`.
  void all_reduce(const at::Tensor& tensor);
  void broadcast(const at::Tensor& tensor, int from);
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor);
  std::vector<std::string> all_gather(const std::string& text);

  /// Returns the line for gradients of models at these places (see `device_place`), and connects NCCL first if that is
  /// used. Must be called on all ranks with equal places.
  Channel connect_devices(const std::vector<std::string>& places, at::Device device);

  /// Starts an all-reduce in place. The tensor must be contiguous, and must not be used until `wait`.
  Pending begin_all_reduce(Channel line, const at::Tensor& tensor);
  /// Starts a broadcast from one rank to tensors of the same size, which must be contiguous and unused until `wait`.
  Pending begin_broadcast(Channel line, const at::Tensor& tensor, int from);
  /// Starts a reduce in place to one rank. The other ranks' tensors have undefined contents afterwards.
  Pending begin_reduce(Channel line, const at::Tensor& tensor, int rank);
  /// Starts an all-to-all: sends each rank its part of `from`, and receives the parts for this rank in `to`. Both are
  /// rows of elements in rank order, and the sizes are the numbers of elements for each rank.
  Pending begin_all_to_all(Channel line, const at::Tensor& to, const at::Tensor& from,
                           std::vector<std::int64_t> sizes_to, std::vector<std::int64_t> sizes_from);
  /// Waits for an operation. `what` describes it in errors, as in "the gradients of a window".
  void wait(const Pending& pending, const std::string& what);

  /// Throws if another accumulator's window is being sent: ranks could send the two in different orders.
  void begin_exchange(const void* exchange);
  void end_exchange(const void* exchange) {
    if (exchange_ == exchange) exchange_ = nullptr;
  }

  /// Throws if there has been an error.
  void check_usable() const;
  /// Reports to the other ranks that this process failed in the middle of an exchange.
  void give_up(const std::string& why);

 private:
  void wait_for_all_ranks() const;
  bool wait_for_gloo(c10d::Work& work);
  bool wait_for_nccl(c10d::Work& work);
  Pending begin(Channel line, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const;
  [[noreturn]] void fail(const std::string& why, const std::string& what);

  int rank_, world_size_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<NcclConnection> nccl_;  // ends after the others, whose end shows other ranks that this one has ended
  std::vector<std::string> places_;       // device places of the models that NCCL connects
  c10::intrusive_ptr<c10d::Backend> gradients_, agreement_;
  Heartbeat heartbeat_;
  std::string failure_;
  const void* exchange_ = nullptr;  // the exchange whose gradients are in flight
};

/// True if each rank has a device, and no two share one, which NCCL refuses.
bool each_has_its_own(const std::vector<std::string>& places);

/// Returns the machine and the CUDA device of all these tensors; "" if they are not on one, or there is no NCCL.
std::string device_place(const std::vector<at::Tensor>& tensors);

/// NCCL connections between the devices of all ranks.
///
/// Connects by a first exchange in a separate thread, since that waits for ranks that may never come. Ends by an abort,
/// which waits for no rank, once all that was sent has arrived or never will.
class NcclConnection {
 public:
  /// Starts to connect, as all ranks must at the same time. `store` must be a connection with no other user.
  NcclConnection(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, at::Device device,
                 std::chrono::milliseconds timeout);
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;
  ~NcclConnection();

  bool answers() const;
  /// Waits until connected. Throws the error if connecting failed.
  void check() { connected_.get(); }

  c10d::Backend& backend() const { return *nccl_; }

  /// Ends all waiting on the device, and abandons what still hangs after ten seconds.
  void abort() noexcept;

 private:
  c10::intrusive_ptr<c10d::Backend> nccl_;
  std::future<void> connected_;
  bool aborted_ = false;
};

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
#include <gradaccum/impl/parallel/connections.ipp>
#endif
