// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/links.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/launch_environment.hpp>
#include <gradaccum/detail/parallel/nccl.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#if defined(USE_C10D_GLOO) && __has_include(<gloo/context.h>)
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace gradaccum::detail {

struct Links::Exchange {
  c10::intrusive_ptr<c10d::Work> work;
  bool by_nccl = false;
};

/// Connects all ranks by LibTorch's own Gloo. They meet in `store`, under `name`.
///
/// GLOO_SOCKET_IFNAME selects the network interface if the host name does not resolve to the right one.
GRADACCUM_INLINE c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                                const std::string& name, const std::string& host,
                                                                int rank, int world_size,
                                                                std::chrono::milliseconds timeout) {
#if defined(USE_C10D_GLOO) && __has_include(<gloo/context.h>)
  using Gloo = c10d::ProcessGroupGloo;
  const auto options = Gloo::Options::create(timeout);
  options->threads = 8;  // buckets at once; with 4 a window takes 2 % longer, with Gloo's default of 2 some 7 %
  const bool local = host == "127.0.0.1" || host == "localhost" || host == "::1";
  if (const char* const interface = std::getenv("GLOO_SOCKET_IFNAME"); interface != nullptr)
    options->devices.push_back(Gloo::createDeviceForInterface(interface));
  else if (local)
    options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  else
    options->devices.push_back(Gloo::createDefaultDevice());
  try {
    return c10::make_intrusive<Gloo>(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, world_size, options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    TORCH_CHECK(false, "ProcessGroup: rank ", rank, " could not be connected with all of the other ", world_size - 1,
                ": one has ended, or cannot be reached (GLOO_SOCKET_IFNAME names the network interface to use). Gloo: ",
                text.substr(0, text.find('\n')));
  }
#else
  static_cast<void>(store), static_cast<void>(name), static_cast<void>(host);
  static_cast<void>(rank), static_cast<void>(world_size), static_cast<void>(timeout);
  TORCH_CHECK(false,
              "ProcessGroup: this program was built without Gloo: it needs a LibTorch that has it, USE_C10D_GLOO "
              "defined, and include/gradaccum_gloo among the include directories; the CMake target "
              "gradaccum::gradaccum sees to the last two");
#endif
}

GRADACCUM_INLINE Links::Links(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host,
                              const std::string& place, int rank, int world_size, std::chrono::milliseconds timeout)
    : rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      store_(store),
      gradients_(connect_gloo(store, "gradients", host, rank, world_size, timeout)),
      agreement_(connect_gloo(store, "agreement", host, rank, world_size, timeout)),
      heartbeat_(store->clone(), place, rank, world_size) {  // calls of one connection wait for each other
  meet();
}

/// Waits until all ranks are connected: one that ended at once would break the connections of those still connecting.
GRADACCUM_INLINE void Links::meet() const {
  const auto key_of = [](int rank) { return "connected/" + std::to_string(rank); };
  store_->set(key_of(rank_), std::vector<std::uint8_t>{1});
  for (int rank = 0; rank < world_size_; ++rank) {
    try {
      store_->wait({key_of(rank)}, timeout_);
    } catch (const c10::DistNetworkError&) {
      return;  // the store ended with rank 0, which had seen all ranks; the next exchange reports it
    } catch (const std::exception&) {
      TORCH_CHECK(false, "ProcessGroup: rank ", rank, " must be connected with all others within ", timeout_.count(),
                  " ms, and is not: it has ended, or hangs");
    }
  }
}

GRADACCUM_INLINE Links::~Links() {
  if (failure_.empty()) return;
  for (auto* const backend : {&gradients_, &agreement_}) static_cast<void>(backend->release());
}

GRADACCUM_INLINE std::shared_ptr<Links> Links::connect(const LaunchEnvironment& environment,
                                                       std::chrono::milliseconds timeout) {
  const auto place = c10::str(environment.launcher_has_store ? "the launcher" : "rank 0", " (its store at ",
                              environment.address, ":", environment.port, ")");
  c10d::TCPStoreOptions options;
  options.port = environment.port;
  options.isServer = environment.rank == 0 && !environment.launcher_has_store;
  options.numWorkers = environment.world_size;
  options.waitWorkers = false;  // connect_gloo() waits
  options.multiTenant = true;   // allows a second group in this process
  options.timeout = timeout;
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(environment.address, options);
  static std::atomic<int> groups = 0;
  const auto name = c10::str("gradaccum/", environment.attempt, "/", groups++);
  store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  return std::make_shared<Links>(store, environment.address, place, environment.rank, environment.world_size, timeout);
}

/// Runs `exchange`, which works in place on contiguous tensors, for a tensor of any strides.
template <class Exchange>
void in_place(const at::Tensor& tensor, const Exchange& exchange) {
  if (tensor.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const auto dense = tensor.detach().contiguous();
  exchange(dense);
  if (!dense.is_alias_of(tensor)) tensor.detach().copy_(dense);
}

GRADACCUM_INLINE void Links::all_reduce(const at::Tensor& tensor) {
  in_place(tensor, [&](auto& dense) { wait(begin_sum(Line::agreement, dense), "a sum over all ranks"); });
}

GRADACCUM_INLINE void Links::broadcast(const at::Tensor& tensor, int from) {
  in_place(tensor, [&](auto& dense) {
    wait(begin_broadcast(Line::agreement, dense, from), "a tensor of rank " + std::to_string(from));
  });
}

GRADACCUM_INLINE std::vector<at::Tensor> Links::all_gather(const at::Tensor& tensor) {
  std::vector<at::Tensor> own{tensor.detach().contiguous()};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int i = 0; i < world_size_; ++i) all[0].push_back(at::empty_like(own[0]));
  const auto gather = [&](auto& backend) { return backend.allgather(all, own); };
  if (own[0].numel() > 0) wait(begin(Line::agreement, gather), "tensors of all ranks");
  return std::move(all[0]);
}

GRADACCUM_INLINE std::vector<std::string> Links::all_gather(const std::string& text) {
  const auto lengths = all_gather(at::tensor(static_cast<std::int64_t>(text.size())));
  std::int64_t longest = 0;
  for (auto& length : lengths) longest = std::max(longest, length.item<std::int64_t>());
  const auto own = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), own.data_ptr<std::uint8_t>());
  const auto all = all_gather(own);
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto* const bytes = all[i].const_data_ptr<std::uint8_t>();
    texts.emplace_back(bytes, bytes + lengths[i].item<std::int64_t>());
  }
  return texts;
}

GRADACCUM_INLINE Links::Line Links::connect_devices(const std::vector<std::string>& places, at::Device device) {
  if (!each_has_its_own(places) || (nccl_ && places != places_)) return Line::gradients;
  if (nccl_) return Line::devices;
  try {
    nccl_ = std::make_unique<NcclLink>(store_->clone(), rank_, world_size_, device, timeout_);
    if (!heartbeat_.poll([&] { return nccl_->answers(); }, timeout_)) fail(heartbeat_.explain(), "NCCL to connect");
    nccl_->check();
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
  places_ = places;
  return Line::devices;
}

GRADACCUM_INLINE Links::Pending Links::begin_sum(Line line, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return begin(line, [&](auto& backend) { return backend.allreduce(tensors); });
}

GRADACCUM_INLINE Links::Pending Links::begin_broadcast(Line line, const at::Tensor& tensor, int from) {
  std::vector<at::Tensor> tensors{bytes_of_row(tensor)};  // supports any dtype
  c10d::BroadcastOptions options;
  options.rootRank = from;
  return begin(line, [&](auto& backend) { return backend.broadcast(tensors, options); });
}

GRADACCUM_INLINE Links::Pending Links::begin_sum_on(Line line, const at::Tensor& tensor, int rank) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::ReduceOptions options;
  options.rootRank = rank;
  return begin(line, [&](auto& backend) { return backend.reduce(tensors, options); });
}

GRADACCUM_INLINE Links::Pending Links::begin_all_to_all(Line line, const at::Tensor& to, const at::Tensor& from,
                                                        std::vector<std::int64_t> sizes_to,
                                                        std::vector<std::int64_t> sizes_from) {
  const auto bytes = static_cast<std::int64_t>(from.element_size());
  for (auto* const sizes : {&sizes_to, &sizes_from})
    for (auto& size : *sizes) size *= bytes;
  auto received = bytes_of_row(to), sent = bytes_of_row(from);
  return begin(line, [&](auto& backend) { return backend.alltoall_base(received, sent, sizes_to, sizes_from); });
}

GRADACCUM_INLINE Links::Pending Links::begin(
    Line line, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const {
  check_usable();
  if (line == Line::devices) return std::make_shared<Exchange>(Exchange{begin(nccl_->backend()), /*by_nccl=*/true});
  static std::mutex one_at_a_time;  // LibTorch records operations in a global map, 2.11 without a lock
  const std::lock_guard lock(one_at_a_time);
  return std::make_shared<Exchange>(Exchange{begin(line == Line::gradients ? *gradients_ : *agreement_)});
}

GRADACCUM_INLINE void Links::wait(const Pending& pending, const std::string& what) {
  check_usable();
  auto& work = *pending->work;
  if (!(pending->by_nccl ? came_by_nccl(work) : came_by_gloo(work))) fail(heartbeat_.explain(), what);
  work.wait();  // makes this thread's stream wait for it
  // The thread that ran it releases the tensors a moment later. Waiting for that lets the caller free their memory.
  const auto latest = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (pending->work.use_count() > 1 && std::chrono::steady_clock::now() < latest) std::this_thread::yield();
}

GRADACCUM_INLINE bool Links::came_by_gloo(c10d::Work& work) {
  const auto future = work.getFuture();
  future->addCallback([wake = heartbeat_.wake()](auto&) { wake(); });
  return heartbeat_.wait([&] { return future->completed(); }) && !future->hasError();
}

/// Polls, as NCCL's futures complete at the launch, a device wakes no thread, and a rank's end would go unnoticed.
GRADACCUM_INLINE bool Links::came_by_nccl(c10d::Work& work) {
  return heartbeat_.poll([&] { return work.isCompleted(); }, timeout_) && !work.exception();
}

GRADACCUM_INLINE void Links::begin_exchange(const void* exchange) {
  TORCH_CHECK(
      exchange_ == nullptr || exchange_ == exchange,
      "Replicas: a window of another accumulator with the same group has sent gradients, and is not closed "
      "yet; call its step() before this backward(), or, without Shard::gradients, use {.overlap = false} for both");
  exchange_ = exchange;
}

GRADACCUM_INLINE void Links::give_up(const std::string& why) {
  if (!failure_.empty()) return;
  failure_ = why.substr(0, why.find('\n'));  // the rest is LibTorch's stack trace
  heartbeat_.announce("rank " + std::to_string(rank_) + " has given up: " + failure_);
  if (nccl_) nccl_->abort();
}

GRADACCUM_INLINE void Links::check_usable() const {
  TORCH_CHECK(failure_.empty(), "ProcessGroup: nothing can be exchanged after an error (", failure_,
              "); end all processes and start them again, from a saved state");
}

GRADACCUM_INLINE void Links::fail(const std::string& why, const std::string& what) {
  failure_ = why;
  if (nccl_) nccl_->abort();
  TORCH_CHECK(false, "ProcessGroup: ", why, " (rank ", rank_, " of ", world_size_, " waited for ", what,
              "); end all processes and start them again, from a saved state");
}

}  // namespace gradaccum::detail
