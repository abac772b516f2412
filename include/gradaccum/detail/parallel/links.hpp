// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
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

struct LaunchEnvironment;
class NcclLink;

/// What lies in one row, of any dtype.
inline at::Tensor bytes_of_row(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

/// The connections of this process with all others of its group.
///
/// Two of each: of one kind all ranks must ask for the same things in the same order, so gradients, sent while backward
/// runs, go by one, and what is agreed about windows by the other.
///
/// Gloo carries both, from devices too, by way of the host. Where each rank's model is on a CUDA device of its own, its
/// gradients go by NCCL, and nothing else does: two NCCL communicators at once may wait for each other forever.
///
/// What waits for others ends in an error when one of them has ended: that names it. After an error nothing can be
/// exchanged any more, since nobody knows what has arrived where.
class Links {
 public:
  enum class Line { gradients, agreement, devices };
  struct Exchange;  ///< that is under way
  using Pending = std::shared_ptr<Exchange>;

  /// `host` is where rank 0 is, and tells whether all are on this machine. `place` says where the store is, for errors.
  Links(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host, const std::string& place, int rank,
        int world_size, std::chrono::milliseconds timeout);
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  /// What is still being exchanged after an error may never end, and would be waited for.
  ~Links();
  static std::shared_ptr<Links> connect(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// See `ProcessGroup`: these wait. Tensors are dense.
  void all_reduce(const at::Tensor& tensor);
  void broadcast(const at::Tensor& tensor, int from);
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor);
  std::vector<std::string> all_gather(const std::string& text);

  /// How gradients are to go, where the models of all ranks are in these places: see `device_place`. All ranks ask
  /// alike.
  Line connect_devices(const std::vector<std::string>& places, at::Device device);

  /// Begins to add up a tensor over all ranks, in place. It is dense, contiguous, and stays alone until `wait`.
  Pending begin_sum(Line line, const at::Tensor& tensor);
  /// Begins to send one rank's numbers to all others, into tensors of that size, which are as those of `begin_sum`.
  Pending begin_broadcast(Line line, const at::Tensor& tensor, int from);
  /// Begins to add up a tensor over all ranks on one of them, in place. What the others have of it is no more.
  Pending begin_sum_on(Line line, const at::Tensor& tensor, int rank);
  /// Begins to give each rank its part of `from`, and to put what each has for this one into `to`: rows of elements,
  /// in the order of the ranks, of these sizes.
  Pending begin_all_to_all(Line line, const at::Tensor& to, const at::Tensor& from, std::vector<std::int64_t> sizes_to,
                           std::vector<std::int64_t> sizes_from);
  /// `what`: "the gradients of a window"
  void wait(const Pending& pending, const std::string& what);

  /// Windows of two accumulators must not be under way at once: ranks could send them in different orders.
  void begin_exchange(const void* exchange);
  void end_exchange(const void* exchange) {
    if (exchange_ == exchange) exchange_ = nullptr;
  }

  /// Throws after an error.
  void check_usable() const;
  /// Something in this process has gone wrong in the middle of an exchange: the others hear of it.
  void give_up(const std::string& why);

 private:
  void meet() const;
  bool came_by_gloo(c10d::Work& work);
  bool came_by_nccl(c10d::Work& work);
  Pending begin(Line line, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const;
  [[noreturn]] void fail(const std::string& why, const std::string& what);

  int rank_, world_size_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<NcclLink> nccl_;   // ends after the others, from which other ranks hear that this one has ended
  std::vector<std::string> places_;  // of the models that it connects
  c10::intrusive_ptr<c10d::Backend> gradients_, agreement_;
  Heartbeat heartbeat_;
  std::string failure_;
  const void* exchange_ = nullptr;  // whose gradients are under way
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/links.ipp>
#endif
