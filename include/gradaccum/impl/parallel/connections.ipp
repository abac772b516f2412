// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/connections.hpp>

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
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

struct Connections::Exchange {
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

GRADACCUM_INLINE Connections::Connections(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host,
                                          const std::string& place, int rank, int world_size,
                                          std::chrono::milliseconds timeout)
    : rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      store_(store),
      gradients_(connect_gloo(store, "gradients", host, rank, world_size, timeout)),
      agreement_(connect_gloo(store, "agreement", host, rank, world_size, timeout)),
      heartbeat_(store->clone(), place, rank, world_size) {  // calls of one connection wait for each other
  wait_for_all_ranks();
}

/// Waits until all ranks are connected: one that ended at once would break the connections of those still connecting.
GRADACCUM_INLINE void Connections::wait_for_all_ranks() const {
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

GRADACCUM_INLINE Connections::~Connections() {
  if (failure_.empty()) return;
  for (auto* const backend : {&gradients_, &agreement_}) static_cast<void>(backend->release());
}

GRADACCUM_INLINE std::shared_ptr<Connections> Connections::connect(const LaunchEnvironment& environment,
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
  return std::make_shared<Connections>(store, environment.address, place, environment.rank, environment.world_size,
                                       timeout);
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

GRADACCUM_INLINE Connections::Channel Connections::connect_devices(const std::vector<std::string>& places,
                                                                   at::Device device) {
  if (!each_has_its_own(places) || (nccl_ && places != places_)) return Channel::gradients;
  if (nccl_) return Channel::devices;
  try {
    nccl_ = std::make_unique<NcclConnection>(store_->clone(), rank_, world_size_, device, timeout_);
    if (!heartbeat_.poll([&] { return nccl_->answers(); }, timeout_)) fail(heartbeat_.explain(), "NCCL to connect");
    nccl_->check();
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
  places_ = places;
  return Channel::devices;
}

GRADACCUM_INLINE Connections::Pending Connections::begin_all_reduce(Channel line, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return begin(line, [&](auto& backend) { return backend.allreduce(tensors); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin_broadcast(Channel line, const at::Tensor& tensor, int from) {
  std::vector<at::Tensor> tensors{bytes_of_row(tensor)};  // supports any dtype
  c10d::BroadcastOptions options;
  options.rootRank = from;
  return begin(line, [&](auto& backend) { return backend.broadcast(tensors, options); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin_reduce(Channel line, const at::Tensor& tensor, int rank) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::ReduceOptions options;
  options.rootRank = rank;
  return begin(line, [&](auto& backend) { return backend.reduce(tensors, options); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin_all_to_all(Channel line, const at::Tensor& to,
                                                                    const at::Tensor& from,
                                                                    std::vector<std::int64_t> sizes_to,
                                                                    std::vector<std::int64_t> sizes_from) {
  const auto bytes = static_cast<std::int64_t>(from.element_size());
  for (auto* const sizes : {&sizes_to, &sizes_from})
    for (auto& size : *sizes) size *= bytes;
  auto received = bytes_of_row(to), sent = bytes_of_row(from);
  return begin(line, [&](auto& backend) { return backend.alltoall_base(received, sent, sizes_to, sizes_from); });
}

GRADACCUM_INLINE Connections::Pending Connections::begin(
    Channel line, const std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>& begin) const {
  check_usable();
  if (line == Channel::devices) return std::make_shared<Exchange>(Exchange{begin(nccl_->backend()), /*by_nccl=*/true});
  static std::mutex one_at_a_time;  // LibTorch records operations in a global map, 2.11 without a lock
  const std::lock_guard lock(one_at_a_time);
  return std::make_shared<Exchange>(Exchange{begin(line == Channel::gradients ? *gradients_ : *agreement_)});
}

GRADACCUM_INLINE void Connections::wait(const Pending& pending, const std::string& what) {
  check_usable();
  auto& work = *pending->work;
  if (!(pending->by_nccl ? wait_for_nccl(work) : wait_for_gloo(work))) fail(heartbeat_.explain(), what);
  work.wait();  // makes this thread's stream wait for it
  // The thread that ran it releases the tensors a moment later. Waiting for that lets the caller free their memory.
  const auto latest = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (pending->work.use_count() > 1 && std::chrono::steady_clock::now() < latest) std::this_thread::yield();
}

GRADACCUM_INLINE bool Connections::wait_for_gloo(c10d::Work& work) {
  const auto future = work.getFuture();
  future->addCallback([wake = heartbeat_.wake()](auto&) { wake(); });
  return heartbeat_.wait([&] { return future->completed(); }) && !future->hasError();
}

/// Polls, as NCCL's futures complete at the launch, a device wakes no thread, and a rank's end would go unnoticed.
GRADACCUM_INLINE bool Connections::wait_for_nccl(c10d::Work& work) {
  return heartbeat_.poll([&] { return work.isCompleted(); }, timeout_) && !work.exception();
}

GRADACCUM_INLINE void Connections::begin_exchange(const void* exchange) {
  TORCH_CHECK(
      exchange_ == nullptr || exchange_ == exchange,
      "Replicas: a window of another accumulator with the same group has sent gradients, and is not closed "
      "yet; call its step() before this backward(), or, without Shard::gradients, use {.overlap = false} for both");
  exchange_ = exchange;
}

GRADACCUM_INLINE void Connections::give_up(const std::string& why) {
  if (!failure_.empty()) return;
  failure_ = why.substr(0, why.find('\n'));  // the rest is LibTorch's stack trace
  heartbeat_.announce("rank " + std::to_string(rank_) + " has given up: " + failure_);
  if (nccl_) nccl_->abort();
}

GRADACCUM_INLINE void Connections::check_usable() const {
  TORCH_CHECK(failure_.empty(), "ProcessGroup: nothing can be exchanged after an error (", failure_,
              "); end all processes and start them again, from a saved state");
}

GRADACCUM_INLINE void Connections::fail(const std::string& why, const std::string& what) {
  failure_ = c10::str(why, " (rank ", rank_, " of ", world_size_, " waited for ", what, ")");
  if (nccl_) nccl_->abort();
  TORCH_CHECK(false, "ProcessGroup: ", failure_, "; end all processes and start them again, from a saved state");
}

}  // namespace gradaccum::detail

// ATen/cuda needs the headers of CUDA's libraries, too.
#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>) && \
    __has_include(<cusparse.h>) && __has_include(<cublas_v2.h>) && __has_include(<cusolverDn.h>)
#define GRADACCUM_HAS_NCCL
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <set>
#include <thread>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE bool each_has_its_own(const std::vector<std::string>& places) {
  const std::set<std::string> different(places.begin(), places.end());
  return different.size() == places.size() && !different.contains("");
}

#ifdef GRADACCUM_HAS_NCCL
/// True if nccl.h has LibTorch's version of NCCL: the layout of NCCL's options differs between versions.
GRADACCUM_INLINE bool nccl_is_as_built() {
  constexpr auto header = std::uint64_t{NCCL_MAJOR} << 32 | std::uint64_t{NCCL_MINOR} << 16;
  const auto present = torch::cuda::nccl::version() & ~std::uint64_t{0xffff};
  if (header != present) {
    TORCH_WARN_ONCE("gradaccum: gradients go by Gloo, not by NCCL: this program was built with the nccl.h of NCCL ",
                    NCCL_MAJOR, ".", NCCL_MINOR, ", and LibTorch has ", present >> 32, ".", (present >> 16) & 0xffff,
                    "; build it with the header of that version (CMake: -DNCCL_ROOT=...)");
  }
  return header == present;
}

GRADACCUM_INLINE std::string device_place(const std::vector<at::Tensor>& tensors) {
  const auto elsewhere = [&](auto& tensor) { return !tensor.is_cuda() || tensor.device() != tensors[0].device(); };
  if (tensors.empty() || std::ranges::any_of(tensors, elsewhere) || !nccl_is_as_built()) return "";
  std::array<char, 256> machine{};
  gethostname(machine.data(), machine.size() - 1);
  const auto& uuid = at::cuda::getDeviceProperties(tensors[0].device().index())->uuid.bytes;
  return machine.data() + ("/" + std::string(std::begin(uuid), std::end(uuid)));
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
GRADACCUM_INLINE std::string device_place(const std::vector<at::Tensor>&) { return ""; }
GRADACCUM_INLINE c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                             std::chrono::milliseconds) {
  TORCH_CHECK(false, "ProcessGroup: this program was built without NCCL");
}
GRADACCUM_INLINE void sum_by_device(c10d::Backend&, at::Device) {}
#endif

GRADACCUM_INLINE NcclConnection::NcclConnection(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                                at::Device device, std::chrono::milliseconds timeout)
    : nccl_(make_nccl(store, rank, world_size, timeout)) {
  std::packaged_task<void()> connect([nccl = nccl_, device] { sum_by_device(*nccl, device); });
  connected_ = connect.get_future();
  std::thread(std::move(connect)).detach();
}

GRADACCUM_INLINE NcclConnection::~NcclConnection() { abort(); }

GRADACCUM_INLINE bool NcclConnection::answers() const {
  return connected_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

GRADACCUM_INLINE void NcclConnection::abort() noexcept {
  if (std::exchange(aborted_, true)) return;
  try {
    std::packaged_task<void()> task([nccl = nccl_] { nccl->abort(); });
    const auto done = task.get_future();
    std::thread(std::move(task)).detach();
    done.wait_for(std::chrono::seconds(10));
  } catch (const std::exception&) {  // no thread could be started
  }
}

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

#undef GRADACCUM_INLINE
