// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace gradaccum::detail {

class NcclConnection;

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

/// Runs `work`, for which other ranks wait, and ends their waiting if it throws. `connections` may be null.
void or_give_up(const auto& connections, const auto& work) {
  try {
    work();
  } catch (const std::exception& error) {
    if (connections) connections->give_up(error.what());
    throw;
  }
}

/// Returns true if each rank has a device, and no two ranks share one, which NCCL rejects.
bool each_has_its_own(const std::vector<std::string>& devices);

/// Returns the machine and the CUDA device of all these tensors; "" if they are not on a single one, or without NCCL.
std::string device_name(const std::vector<at::Tensor>& tensors);

/// Returns the address by which other machines reach this one: by its name; if that is a loopback address, as on
/// Debian, on the route to rank 0's `host`; on rank 0's machine, on the route to another of the first `ranks` ranks.
/// All ranks must call it.
std::string reachable_address(c10d::Store& store, const std::string& name, const std::string& host, int rank,
                              int ranks);

bool is_loopback(const std::string& address);
std::string in_seconds(std::chrono::milliseconds time);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/connections.ipp>
#endif
