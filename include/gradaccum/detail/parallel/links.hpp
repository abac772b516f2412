// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/gloo.hpp>
#include <gradaccum/detail/parallel/heartbeat.hpp>
#include <gradaccum/detail/parallel/launch_environment.hpp>
#include <gradaccum/detail/parallel/nccl.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

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
  struct Pending {
    c10::intrusive_ptr<c10d::Work> work;
    bool by_nccl = false;
  };
  enum class Line { gradients, agreement, devices };

  Links(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host, const std::string& place, int rank,
        int world_size, std::chrono::milliseconds timeout)
      : rank_(rank),
        world_size_(world_size),
        timeout_(timeout),
        store_(store),
        gradients_(connect_gloo(store, "gradients", host, rank, world_size, timeout)),
        agreement_(connect_gloo(store, "agreement", host, rank, world_size, timeout)),
        heartbeat_(store, place, rank, world_size) {}
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  /// What is still being exchanged after an error may never end, and would be waited for.
  ~Links() {
    if (failure_.empty()) return;
    for (auto* const backend : {&gradients_, &agreement_}) static_cast<void>(backend->release());
  }

  static std::shared_ptr<Links> connect(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
    const auto place = c10::str(environment.launcher_has_store ? "the launcher" : "rank 0", " (its store at ",
                                environment.address, ":", environment.port, ")");
    c10d::TCPStoreOptions options;
    options.port = environment.port;
    options.isServer = environment.rank == 0 && !environment.launcher_has_store;
    options.numWorkers = environment.world_size;
    options.waitWorkers = false;  // connecting Gloo waits
    options.multiTenant = true;   // a second group in this process
    options.timeout = timeout;
    c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(environment.address, options);
    static std::atomic<int> groups = 0;
    const auto name = c10::str("gradaccum/", environment.attempt, "/", groups++);
    store = c10::make_intrusive<c10d::PrefixStore>(name, store);
    return std::make_shared<Links>(store, environment.address, place, environment.rank, environment.world_size,
                                   timeout);
  }

  /// How gradients are to go, where the models of all ranks are in these places: see `device_place`. All ranks ask
  /// alike.
  Line connect_devices(const std::vector<std::string>& places, at::Device device) {
    if (!each_has_its_own(places) || (nccl_ && places != places_)) return Line::gradients;
    if (nccl_) return Line::devices;
    nccl_ = std::make_unique<NcclLink>(store_->clone(), rank_, world_size_, device, timeout_);
    if (!heartbeat_.poll([&] { return nccl_->answers(); }, timeout_)) fail(heartbeat_.explain(), "NCCL to connect");
    try {
      nccl_->check();
    } catch (const std::exception& error) {
      give_up(error.what());
      throw;
    }
    places_ = places;
    return Line::devices;
  }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// Begins to add up a tensor over all ranks, in place. It is dense, contiguous, and stays alone until `wait`.
  Pending begin_sum(Line line, const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor};
    if (line == Line::devices) {
      check_usable();
      return {nccl_->begin_sum(tensors), /*by_nccl=*/true};
    }
    auto& backend = line == Line::gradients ? *gradients_ : *agreement_;
    return {begin([&] { return backend.allreduce(tensors); })};
  }
  Pending begin_broadcast(const at::Tensor& tensor, int from) {
    std::vector<at::Tensor> tensors{tensor.view({-1}).view(at::kByte)};  // of any dtype
    c10d::BroadcastOptions options;
    options.rootRank = from;
    return {begin([&] { return agreement_->broadcast(tensors, options); })};
  }
  Pending begin_gather(std::vector<at::Tensor> of_ranks, const at::Tensor& own) {
    std::vector<std::vector<at::Tensor>> outputs{std::move(of_ranks)};
    std::vector<at::Tensor> inputs{own};
    return {begin([&] { return agreement_->allgather(outputs, inputs); })};
  }

  /// Windows of two accumulators must not be under way at once: ranks could send them in different orders.
  void begin_exchange(const void* exchange) {
    TORCH_CHECK(exchange_ == nullptr || exchange_ == exchange,
                "Replicas: a window of another accumulator with the same group has sent gradients, and is not closed "
                "yet; call its step() before this backward(), or use {.overlap = false} for both");
    exchange_ = exchange;
  }
  void end_exchange(const void* exchange) {
    if (exchange_ == exchange) exchange_ = nullptr;
  }

  /// `what`: "the gradients of a window"
  void wait(const Pending& pending, const std::string& what) {
    check_usable();
    if (!(pending.by_nccl ? came_by_nccl(*pending.work) : came_by_gloo(*pending.work)))
      fail(heartbeat_.explain(), what);
    pending.work->wait();  // puts this thread's stream behind it
  }

  /// Something in this process has gone wrong in the middle of an exchange: the others hear of it.
  void give_up(const std::string& why) {
    if (!failure_.empty()) return;
    failure_ = why.substr(0, why.find('\n'));  // the rest tells where LibTorch threw it
    heartbeat_.announce("rank " + std::to_string(rank_) + " has given up: " + failure_);
    if (nccl_) nccl_->abort();
  }

 private:
  bool came_by_gloo(c10d::Work& work) {
    const auto future = work.getFuture();
    future->addCallback([wake = heartbeat_.wake()](auto&) { wake(); });
    return heartbeat_.wait([&] { return future->completed(); }) && !future->hasError();
  }
  /// Its futures are completed by the launch. Nobody is woken by a device, and an end of others would not be seen.
  bool came_by_nccl(c10d::Work& work) {
    return heartbeat_.poll([&] { return work.isCompleted(); }, timeout_) && !work.exception();
  }

  template <class Begin>
  c10::intrusive_ptr<c10d::Work> begin(const Begin& begin) {
    check_usable();
    static std::mutex one_at_a_time;  // LibTorch notes what begins in a map of the process, 2.11 without a lock
    const std::lock_guard lock(one_at_a_time);
    return begin();
  }
  void check_usable() const {
    TORCH_CHECK(failure_.empty(), "ProcessGroup: nothing can be exchanged after an error (", failure_,
                "); end all processes and start them again, from a saved state");
  }
  [[noreturn]] void fail(const std::string& why, const std::string& what) {
    failure_ = why;
    if (nccl_) nccl_->abort();
    TORCH_CHECK(false, "ProcessGroup: ", why, " (rank ", rank_, " of ", world_size_, " waited for ", what,
                "); end all processes and start them again, from a saved state");
  }

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
