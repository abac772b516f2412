// SPDX-License-Identifier: Apache-2.0
// Connections between ranks: Gloo, NCCL, their exchanges and errors.
#pragma once

#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/platform/sockets.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#if defined(USE_C10D_GLOO) && __has_include(<gloo/context.h>)
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
// ATen/cuda needs the headers of CUDA's libraries, too.
#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>) && \
    __has_include(<cusparse.h>) && __has_include(<cublas_v2.h>) && __has_include(<cusolverDn.h>)
#define GRADACCUM_HAS_NCCL
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <cstddef>
#include <cstdlib>
#include <exception>
#include <future>
#include <mutex>
#include <set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string in_seconds(std::chrono::milliseconds time) {
  return c10::str(static_cast<double>(time.count()) / 1000, " s");
}

GRADACCUM_INLINE bool each_has_its_own(const std::vector<std::string>& devices) {
  const std::set<std::string> different(devices.begin(), devices.end());
  return different.size() == devices.size() && !different.contains("");
}

#ifdef GRADACCUM_HAS_NCCL
/// True if nccl.h has LibTorch's version of NCCL: the layout of NCCL's options differs between versions.
GRADACCUM_INLINE bool nccl_is_as_built() {
  constexpr auto header = std::uint64_t{NCCL_MAJOR} << 32 | std::uint64_t{NCCL_MINOR} << 16;
  const auto present = torch::cuda::nccl::version() & ~std::uint64_t{0xffff};
  if (header != present) {
    TORCH_WARN_ONCE("ProcessGroup: gradients go by Gloo, not NCCL: this program was built with the nccl.h of NCCL ",
                    NCCL_MAJOR, ".", NCCL_MINOR, ", but LibTorch has ", present >> 32, ".", (present >> 16) & 0xffff,
                    "; build it with that version of the header (CMake: -DNCCL_ROOT=...)");
  }
  return header == present;
}

GRADACCUM_INLINE std::string device_name(const std::vector<at::Tensor>& tensors) {
  const auto elsewhere = [&](auto& tensor) { return !tensor.is_cuda() || tensor.device() != tensors[0].device(); };
  if (tensors.empty() || std::ranges::any_of(tensors, elsewhere) || !nccl_is_as_built()) return "";
  const auto& uuid = at::cuda::getDeviceProperties(tensors[0].device().index())->uuid.bytes;
  return machine_name() + ("/" + std::string(std::begin(uuid), std::end(uuid)));
}

GRADACCUM_INLINE c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                             int world_size, std::chrono::milliseconds timeout) {
  // By default LibTorch ends the process a minute after an error, and later attempts that find the error in the store.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>("devices", store), rank,
                                                     world_size, options);
}

/// Sums a number over all ranks, which connects them. Waits for the device.
GRADACCUM_INLINE void sum_by_device(c10d::Backend& nccl, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  std::vector<at::Tensor> tensors{at::zeros({1}, device)};
  nccl.allreduce(tensors)->wait();
  tensors[0].item();
}
#undef GRADACCUM_HAS_NCCL
#else
GRADACCUM_INLINE std::string device_name(const std::vector<at::Tensor>&) { return ""; }
GRADACCUM_INLINE c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                             std::chrono::milliseconds) {
  TORCH_CHECK(false, "ProcessGroup: this program was built without NCCL");
}
GRADACCUM_INLINE void sum_by_device(c10d::Backend&, at::Device) {}
#endif

/// NCCL connections between the devices of all ranks. Connects by a first exchange in a separate thread, since that
/// waits for ranks that may never come. Ends by an abort, which waits for none.
class NcclConnection {
 public:
  /// Starts to connect, as all ranks must at the same time. `store` must be a connection with no other user.
  NcclConnection(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, at::Device device,
                 std::chrono::milliseconds timeout)
      : nccl_(make_nccl(store, rank, world_size, timeout)) {
    std::packaged_task<void()> connect([nccl = nccl_, device] { sum_by_device(*nccl, device); });
    connected_ = connect.get_future();
    starting_thread("ProcessGroup", [&] { return std::thread(std::move(connect)); }).detach();
  }
  NcclConnection& operator=(NcclConnection&&) = delete;
  ~NcclConnection() { abort(); }

  bool answers() const { return connected_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  /// Waits until connected. Throws the error if connecting failed.
  void check() { connected_.get(); }

  c10d::Backend& backend() const { return *nccl_; }

  /// Ends all waiting on the device, and abandons what still hangs after ten seconds.
  void abort() noexcept {
    if (std::exchange(aborted_, true)) return;
    try {
      std::packaged_task<void()> task([nccl = nccl_] { nccl->abort(); });
      const auto done = task.get_future();
      std::thread(std::move(task)).detach();
      done.wait_for(std::chrono::seconds(10));
    } catch (const std::exception&) {  // no thread could be started
    }
  }

 private:
  c10::intrusive_ptr<c10d::Backend> nccl_;
  std::future<void> connected_;
  bool aborted_ = false;
};

struct Connections::Exchange {
  c10::intrusive_ptr<c10d::Work> work;
  bool by_nccl = false;
};

GRADACCUM_INLINE bool is_loopback(const std::string& address) {
  return address.empty() || address.starts_with("127.") || address == "::1" || address == "localhost";
}

GRADACCUM_INLINE std::string reachable_address(c10d::Store& store, const std::string& name, const std::string& host,
                                               int rank, int ranks) {
  const auto key_of = [](int of) { return "address/" + std::to_string(of); };
  auto own = address_towards(name);
  if (is_loopback(own)) own = address_towards(host);
  store.set(key_of(rank), own);
  for (int other = 0; other < ranks && is_loopback(own); ++other) {
    const auto theirs = store.get_to_str(key_of(other));
    if (is_loopback(theirs)) continue;
    own = address_towards(theirs);
    TORCH_CHECK(!is_loopback(own), "no network interface reaches rank ", other, " at ", theirs);
  }
  return own.empty() ? "127.0.0.1" : own;  // all are on one machine
}

/// Returns what a call of Gloo returns, with errors that say that this rank could not do `what`.
auto with_gloo(int rank, const std::string& what, const auto& call) {
  return starting_thread("ProcessGroup", [&] {
    try {
      return call();
    } catch (const std::system_error&) {
      throw;
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "ProcessGroup: rank ", rank, " could not ", what,
                  " (GLOO_SOCKET_IFNAME sets the network interface to use). Gloo: ", first_line(error.what()));
    }
  });
}

/// Opens a network interface for LibTorch's own Gloo. Returns a function that connects all ranks, which meet in `store`
/// under `name`. GLOO_SOCKET_IFNAME selects the interface if the host name does not resolve to the right one.
GRADACCUM_INLINE std::function<c10::intrusive_ptr<c10d::Backend>()> prepare_gloo(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, const std::string& host, int rank,
    int world_size, std::chrono::milliseconds timeout) {
#if defined(USE_C10D_GLOO) && __has_include(<gloo/context.h>)
  using Gloo = c10d::ProcessGroupGloo;
  const auto options = Gloo::Options::create(timeout);
  options->threads = 8;  // concurrent buckets; with 4 a window takes 2 % longer, with Gloo's default of 2 some 7 %
  const auto meeting = c10::make_intrusive<c10d::PrefixStore>(name, store);
  options->devices.push_back(with_gloo(rank, "open its network interface", [&] {
    const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
    const auto address = is_loopback(host)
                             ? "127.0.0.1"
                             : reachable_address(*meeting, machine_name(), host, rank, interface ? 0 : world_size);
    return interface ? Gloo::createDeviceForInterface(interface) : Gloo::createDeviceForHostname(address);
  }));
  return [=] {
    const auto what = c10::str("connect to all of the other ", world_size - 1, ": one has ended or cannot be reached");
    return with_gloo(rank, what, [&]() -> c10::intrusive_ptr<c10d::Backend> {
      return c10::make_intrusive<Gloo>(meeting, rank, world_size, options);
    });
  };
#else
  static_cast<void>(store), static_cast<void>(name), static_cast<void>(host);
  static_cast<void>(rank), static_cast<void>(world_size), static_cast<void>(timeout);
  TORCH_CHECK(
      false,
      "ProcessGroup: this program was built without Gloo: use a LibTorch that has it, define USE_C10D_GLOO, and add "
      "include/gradaccum_gloo to the include directories; the CMake target gradaccum::gradaccum does the last two");
#endif
}

/// A rank that fails reports the reason to the other ranks. All steps that can fail are done before Gloo connects, as
/// nothing ends a wait inside it. The constructor returns when all ranks are connected: a rank that ended earlier would
/// break the connections of the other ranks.
GRADACCUM_INLINE Connections::Connections(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host,
                                          const std::string& store_name, int rank, int world_size,
                                          std::chrono::milliseconds timeout, std::chrono::milliseconds patience)
    : rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      store_(store),
      heartbeat_(store->clone(), store_name, rank, world_size) {  // calls of one connection wait for each other
  or_give_up(this, [&] {
    meet("to start", patience);
    const auto gradients = prepare_gloo(store, "gradients", host, rank, world_size, timeout);
    const auto agreement = prepare_gloo(store, "agreement", host, rank, world_size, timeout);
    meet("to open their network interfaces", patience);
    gradients_ = gradients();
    agreement_ = agreement();
    meet("to connect", patience);
  });
}

GRADACCUM_INLINE void Connections::meet(const std::string& point, std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  bool warned = rank_ != 0;
  try {
    auto pause = std::chrono::milliseconds(1);
    for (auto here = store_->add(point, 1); here < world_size_; here = store_->add(point, 0)) {
      if (heartbeat_.failed() || Clock::now() - begin > timeout_) fail(heartbeat_.explain(), "all ranks " + point);
      if (Clock::now() - begin > patience && !std::exchange(warned, true))
        TORCH_WARN("ProcessGroup: rank 0 waits for all ranks ", point, ": after ", in_seconds(patience), " ", here,
                   " of ", world_size_, " have; it gives up after ", in_seconds(timeout_));
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::milliseconds(25));
    }
  } catch (const c10::DistError&) {  // the store has ended with rank 0
    fail(heartbeat_.explain(), "all ranks " + point);
  }
}

GRADACCUM_INLINE Connections::~Connections() {
  if (failure_.empty()) return;
  for (auto* const backend : {&gradients_, &agreement_}) static_cast<void>(backend->release());
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

GRADACCUM_INLINE void Connections::all_reduce(const at::Tensor& tensor) {
  in_place(tensor, [&](auto& dense) { wait(begin_all_reduce(Channel::agreement, dense), "a sum over all ranks"); });
}

GRADACCUM_INLINE void Connections::broadcast(const at::Tensor& tensor, int from) {
  in_place(tensor, [&](auto& dense) {
    wait(begin_broadcast(Channel::agreement, dense, from), "a tensor of rank " + std::to_string(from));
  });
}

GRADACCUM_INLINE std::vector<at::Tensor> Connections::all_gather(const at::Tensor& tensor) {
  std::vector<at::Tensor> own{tensor.detach().contiguous()};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int i = 0; i < world_size_; ++i) all[0].push_back(at::empty_like(own[0]));
  const auto gather = [&](auto& backend) { return backend.allgather(all, own); };
  if (own[0].numel() > 0) wait(begin(Channel::agreement, gather), "tensors of all ranks");
  return std::move(all[0]);
}

GRADACCUM_INLINE std::vector<std::string> Connections::all_gather(const std::string& text) {
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

GRADACCUM_INLINE Connections::Channel Connections::connect_devices(const std::vector<std::string>& devices,
                                                                   at::Device own) {
  if (!each_has_its_own(devices) || (nccl_ && devices != devices_)) return Channel::gradients;
  if (nccl_) return Channel::devices;
  or_give_up(this, [&] {
    nccl_ = std::make_unique<NcclConnection>(store_->clone(), rank_, world_size_, own, timeout_);
    if (!heartbeat_.poll([&] { return nccl_->answers(); }, timeout_)) fail(heartbeat_.explain(), "NCCL to connect");
    nccl_->check();
  });
  devices_ = devices;
  return Channel::devices;
}

GRADACCUM_INLINE Connections::Pending Connections::begin_all_reduce(Channel channel, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return begin(channel, [&](auto& backend) { return backend.allreduce(tensors); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin_broadcast(Channel channel, const at::Tensor& tensor,
                                                                   int from) {
  std::vector<at::Tensor> tensors{bytes_of_row(tensor)};  // supports any dtype
  c10d::BroadcastOptions options;
  options.rootRank = from;
  return begin(channel, [&](auto& backend) { return backend.broadcast(tensors, options); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin_reduce(Channel channel, const at::Tensor& tensor, int rank) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::ReduceOptions options;
  options.rootRank = rank;
  return begin(channel, [&](auto& backend) { return backend.reduce(tensors, options); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin_all_to_all(Channel channel, const at::Tensor& to,
                                                                    const at::Tensor& from,
                                                                    std::vector<std::int64_t> sizes_to,
                                                                    std::vector<std::int64_t> sizes_from) {
  const auto bytes = static_cast<std::int64_t>(from.element_size());
  for (auto* const sizes : {&sizes_to, &sizes_from})
    for (auto& size : *sizes) size *= bytes;
  auto received = bytes_of_row(to), sent = bytes_of_row(from);
  return begin(channel, [&](auto& backend) { return backend.alltoall_base(received, sent, sizes_to, sizes_from); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin(
    Channel channel, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const {
  check_usable();
  if (channel == Channel::devices)
    return std::make_shared<Exchange>(Exchange{begin(nccl_->backend()), /*by_nccl=*/true});
  static std::mutex one_at_a_time;  // LibTorch records operations in a global map, 2.11 without a lock
  const std::lock_guard lock(one_at_a_time);
  return std::make_shared<Exchange>(Exchange{begin(channel == Channel::gradients ? *gradients_ : *agreement_)});
}

GRADACCUM_INLINE void Connections::wait(const Pending& pending, const std::string& what) {
  check_usable();
  auto& work = *pending->work;
  bool arrived = false;
  if (pending->by_nccl) {
    // Polls, as NCCL's futures complete at the launch, a device wakes no thread, and a rank's end would go unnoticed.
    arrived = heartbeat_.poll([&] { return work.isCompleted(); }, timeout_) && !work.exception();
  } else {
    const auto future = work.getFuture();
    future->addCallback([wake = heartbeat_.wake()](auto&) { wake(); });
    arrived = heartbeat_.wait([&] { return future->completed(); }) && !future->hasError();
  }
  if (!arrived) fail(heartbeat_.explain(), what);
  work.wait();  // makes this thread's stream wait for it
  // The thread that ran it releases the tensors a moment later. Waiting for that lets the caller free their memory.
  const auto latest = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (pending->work.use_count() > 1 && std::chrono::steady_clock::now() < latest) std::this_thread::yield();
}

GRADACCUM_INLINE void Connections::begin_exchange(const void* exchange) {
  TORCH_CHECK(
      exchange_ == nullptr || exchange_ == exchange,
      "Replicas: another accumulator with the same ProcessGroup has sent gradients of a window that is still open; "
      "call its step() before this backward(), or, without Shard::gradients, use {.overlap = false} for both");
  exchange_ = exchange;
}

GRADACCUM_INLINE void Connections::give_up(const std::string& why) {
  if (!failure_.empty()) return;
  failure_ = first_line(why);
  heartbeat_.announce("rank " + std::to_string(rank_) + " has given up: " + failure_);
  if (nccl_) nccl_->abort();
}

GRADACCUM_INLINE void Connections::check_usable() const {
  TORCH_CHECK(failure_.empty(), "ProcessGroup: no data can be exchanged after an error (", failure_,
              "); end all processes and restart them from a saved state");
}

GRADACCUM_INLINE void Connections::fail(const std::string& why, const std::string& what) {
  failure_ = c10::str(why, " (rank ", rank_, " of ", world_size_, " waited for ", what, ")");
  if (nccl_) nccl_->abort();
  TORCH_CHECK(false, "ProcessGroup: ", failure_, "; end all processes and restart them from a saved state");
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
