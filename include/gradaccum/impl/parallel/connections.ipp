// SPDX-License-Identifier: Apache-2.0
// Connections between processes: environment, rendezvous, collectives, and who has stopped answering.
#pragma once

#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
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

#include <netdb.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <future>
#include <limits>
#include <mutex>
#include <set>
#include <string_view>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string have_ended(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return ranks.size() == 1 ? "rank " + text + " has ended or hangs" : "ranks " + text + " have ended or hang";
}

GRADACCUM_INLINE std::string in_seconds(std::chrono::milliseconds time) {
  return c10::str(static_cast<double>(time.count()) / 1000, " s");
}

GRADACCUM_INLINE void put(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
}

GRADACCUM_INLINE std::string text_at(c10d::Store& store, const std::string& key) {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

/// The entries of processes in their store: counters that show that each is alive and how far it is, and a failure. For
/// use by one thread, except for `answers`. Each call waits for the store.
class HeartbeatEntries {
 public:
  HeartbeatEntries(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), size_(world_size) {}

  /// The number of times that the store has counted, which stops increasing while the store does not answer.
  std::int64_t answers() const { return answers_; }

  void count_beat() { add(beats_of(rank_), 1); }
  /// Adds to the number of times that this process has waited for others.
  void count_waits(std::int64_t times) {
    if (times > 0) add(waits_of(rank_), times);
  }
  void set_failure(const std::string& what) { put(*store_, "failure", what); }
  std::optional<std::string> failure() {
    return store_->check({"failure"}) ? std::optional(text_at(*store_, "failure")) : std::nullopt;
  }

  /// Returns the beats of ranks in [`first`, `last`): 0 before a rank starts, at least `left` after it has left.
  std::vector<std::int64_t> beats(int first, int last) { return read(beats_of, first, last); }
  static constexpr std::int64_t left = std::int64_t{1} << 62;

  /// Returns the ranks whose beats have stopped since they were `before`, in words; else the rank that has waited the
  /// fewest times; else nullopt.
  std::optional<std::string> missing_since(const std::vector<std::int64_t>& before) {
    const auto now = beats(0, size_);
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < now.size(); ++rank)
      if (now[rank] == before[rank]) ranks.push_back(static_cast<int>(rank));
    if (!ranks.empty()) return have_ended(ranks);
    const auto waits = read(waits_of, 0, size_);
    const auto [least, most] = std::ranges::minmax_element(waits);
    if (*least == *most) return {};
    return "rank " + std::to_string(least - waits.begin()) + " hangs, or does something else than the others";
  }

  /// Marks this rank as having left. Rank 0, whose process has the store, waits for the others, but at most `longest`.
  void leave(std::chrono::milliseconds longest) {
    const auto begin = std::chrono::steady_clock::now();
    add(beats_of(rank_), left);  // no rank must report it as missing
    auto gone = add("left", 1);
    while (rank_ == 0 && gone < size_ && std::chrono::steady_clock::now() - begin < longest) {
      std::this_thread::sleep_for(std::chrono::milliseconds(25));
      gone = add("left", 0);
    }
  }

 private:
  static std::string beats_of(int rank) { return "heartbeat/" + std::to_string(rank); }
  static std::string waits_of(int rank) { return "waits/" + std::to_string(rank); }

  std::int64_t add(const std::string& key, std::int64_t number) {
    const auto sum = store_->add(key, number);
    ++answers_;
    return sum;
  }
  /// Reads all counters in one request if the store supports that, since there may be hundreds.
  std::vector<std::int64_t> read(std::string (*key_of)(int rank), int first, int last) {
    std::vector<std::string> keys;
    for (int rank = first; rank < last; ++rank) keys.push_back(key_of(rank));
    for (auto& key : keys)
      if (known_.insert(key).second) add(key, 0);  // the store would wait for a missing key
    std::vector<std::int64_t> numbers;
    if (store_->hasExtendedApi())
      for (auto& bytes : store_->multiGet(keys)) numbers.push_back(std::stoll(std::string(bytes.begin(), bytes.end())));
    else
      for (auto& key : keys) numbers.push_back(std::stoll(text_at(*store_, key)));
    return numbers;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::set<std::string> known_;  // keys that are in the store
  std::atomic<std::int64_t> answers_ = 0;
};

/// The state that the counting and the waiting thread share.
struct Heartbeat::Shared {
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds interval{250};
  static constexpr int beats_a_check = 4;
  static constexpr Milliseconds standstill{2000};  ///< time in which a live process must count
  static constexpr Milliseconds patience{10000};   ///< longest wait for the store

  Shared(c10::intrusive_ptr<c10d::Store> store, std::string given_name, int rank, int world_size,
         Milliseconds given_timeout)
      : entries(std::move(store), rank, world_size),
        store_name(std::move(given_name)),
        size(world_size),
        first_checked(rank == 0 ? 1 : 0),
        checked(static_cast<std::size_t>(rank == 0 ? world_size - 1 : 1), StallDetector(given_timeout)),
        timeout(given_timeout) {}

  HeartbeatEntries entries;
  const std::string store_name;
  const int size, first_checked;
  std::vector<StallDetector> checked;  // of all others on rank 0, and of rank 0 elsewhere
  const Milliseconds timeout;
  int beats = 0;
  std::int64_t waits = 0, counted_waits = 0;  // waits for other processes: all, and those in the store

  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false, stopped = false, asked = false, unanswered = false;
  std::optional<std::string> failure, to_announce;

  void run() {
    try {
      do beat();
      while (pause(interval));
      entries.leave(failed() ? standstill : patience / 2);
    } catch (const std::exception&) {
      fail(store_name + " has ended, or cannot be reached");
    }
    const std::lock_guard lock(mutex);
    stopped = true;
    changed.notify_all();
  }

  /// Ends the thread. Returns true if it hangs.
  bool stop() {
    std::unique_lock lock(mutex);
    stopping = true;
    changed.notify_all();
    return !changed.wait_for(lock, unanswered ? Milliseconds(0) : patience, [this] { return stopped; });
  }

  bool failed() {
    const std::lock_guard lock(mutex);
    return failure.has_value();
  }
  void fail(std::string text) {
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::move(text);
    changed.notify_all();
  }
  /// Reports a failure to all processes.
  void fail_all(const std::string& text) {
    entries.set_failure(text);
    fail(text);
  }

  void beat() {
    entries.count_beat();
    std::optional<std::string> ours;
    bool wanted = false;
    std::int64_t new_waits = 0;
    {
      const std::lock_guard lock(mutex);
      ours = to_announce;
      wanted = asked && !failure;
      new_waits = waits - std::exchange(counted_waits, waits);
    }
    entries.count_waits(new_waits);
    if (const auto theirs = entries.failure()) return fail(*theirs);
    if (ours) return fail_all(*ours);
    if (wanted) return find_cause();
    if (beats++ % beats_a_check == 0) find_stalled();
  }

  /// Finds the cause of a failure. This process goes on counting meanwhile.
  void find_cause() {
    const auto before = entries.beats(0, size);
    const auto begin = Clock::now();
    while (Clock::now() - begin < standstill) {
      entries.count_beat();
      if (!pause(interval)) return;
    }
    const auto who = entries.missing_since(before);
    if (entries.failure()) return;  // another process was faster; its report is read at the next beat
    fail_all(who.value_or("all processes are there, but the connection between two of them is lost"));
  }

  /// Finds ranks whose beats have stopped without their having left.
  void find_stalled() {
    const auto now = entries.beats(first_checked, first_checked + static_cast<int>(checked.size()));
    std::vector<int> ranks;
    for (std::size_t i = 0; i < now.size(); ++i)
      if (checked[i].stalled(now[i]) && now[i] > 0 && now[i] < HeartbeatEntries::left)
        ranks.push_back(first_checked + static_cast<int>(i));
    if (!ranks.empty() && !failed()) fail_all(have_ended(ranks) + out_of_reach());
  }
  std::string out_of_reach() const {
    return ", or cannot be reached: silent for " + std::to_string(timeout.count() / 1000) + " s";
  }

  /// Waits, and returns false when the thread must end.
  bool pause(Milliseconds time) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, time, [this] { return stopping || (to_announce && !failure); });
    return !stopping;
  }

  /// Checks `done()` when woken, and after each `step`.
  bool wait(const std::function<bool()>& done, std::chrono::microseconds step, Clock::time_point end) {
    std::unique_lock lock(mutex);
    ++waits;
    StallDetector of_store(timeout);
    while (!done() && !failure && Clock::now() < end) {
      unanswered = of_store.stalled(entries.answers());
      if (unanswered)
        failure = store_name + " has ended or hangs" + out_of_reach();
      else
        changed.wait_for(lock, step);
    }
    return done();
  }
};

GRADACCUM_INLINE Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string store_name, int rank,
                                      int world_size, std::chrono::milliseconds timeout)
    : shared_(std::make_shared<Shared>(std::move(store), std::move(store_name), rank, world_size, timeout)) {
  thread_ = starting_thread("ProcessGroup", [&] { return std::thread([shared = shared_] { shared->run(); }); });
}

GRADACCUM_INLINE Heartbeat::~Heartbeat() {
  if (shared_->stop())
    thread_.detach();  // it hangs in a store that does not answer
  else
    thread_.join();
}

GRADACCUM_INLINE bool Heartbeat::wait(const std::function<bool()>& done) {
  return shared_->wait(done, Shared::interval, Shared::Clock::time_point::max());
}

GRADACCUM_INLINE bool Heartbeat::poll(const std::function<bool()>& done, std::chrono::milliseconds longest) {
  return shared_->wait(done, std::chrono::microseconds(50), Shared::Clock::now() + longest);
}

GRADACCUM_INLINE std::function<void()> Heartbeat::wake() const {
  return [shared = shared_] {
    { const std::lock_guard lock(shared->mutex); }
    shared->changed.notify_all();
  };
}

GRADACCUM_INLINE bool Heartbeat::failed() const { return shared_->failed(); }

GRADACCUM_INLINE std::string Heartbeat::explain() {
  auto& all = *shared_;
  std::unique_lock lock(all.mutex);
  all.asked = true;
  all.changed.wait_for(lock, Shared::patience, [&] { return all.failure || all.stopped; });
  return all.failure ? *all.failure : all.store_name + " has ended or hangs";
}

GRADACCUM_INLINE void Heartbeat::announce(std::string failure) {
  auto& all = *shared_;
  std::unique_lock lock(all.mutex);
  if (all.failure) return;
  all.to_announce = std::move(failure);
  all.changed.notify_all();
  all.changed.wait_for(lock, Shared::patience, [&] { return all.failure || all.stopped; });
}

GRADACCUM_INLINE std::string machine_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
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

/// Connects a datagram socket, which sends nothing.
GRADACCUM_INLINE std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const auto end = c10::make_scope_exit([found] { freeaddrinfo(found); });
  for (const auto* one = found; one != nullptr; one = one->ai_next) {
    const int descriptor = socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const auto closed = c10::make_scope_exit([descriptor] { close(descriptor); });
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    std::array<char, NI_MAXHOST> text{};
    auto* const address = reinterpret_cast<sockaddr*>(&own);
    if (connect(descriptor, one->ai_addr, one->ai_addrlen) == 0 && getsockname(descriptor, address, &length) == 0 &&
        getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0)
      return text.data();
  }
  return "";
}

GRADACCUM_INLINE std::string reachable_address(c10d::Store& store, const std::string& name, const std::string& host,
                                               int rank, int ranks) {
  const auto key_of = [](int of) { return "address/" + std::to_string(of); };
  auto own = address_towards(name);
  if (is_loopback(own)) own = address_towards(host);
  put(store, key_of(rank), own);
  for (int other = 0; other < ranks && is_loopback(own); ++other) {
    const auto theirs = text_at(store, key_of(other));
    if (is_loopback(theirs)) continue;
    own = address_towards(theirs);
    TORCH_CHECK(!is_loopback(own), "no network interface reaches rank ", other, " at ", theirs);
  }
  return own.empty() ? "127.0.0.1" : own;  // all are on one machine
}

/// Blocks SIGPIPE in this thread until the end of the scope, and for good in the threads that it starts. Gloo and the
/// server of TCPStore write to sockets that others may have closed, where the signal would end the process without a
/// word.
GRADACCUM_INLINE auto block_sigpipe() {
  sigset_t blocked, before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  return c10::make_scope_exit([before] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
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
  options->threads = 8;  // buckets at once; with 4 a window takes 2 % longer, with Gloo's default of 2 some 7 %
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

/// A rank that fails tells the others why. So before Gloo connects, where nothing ends its waiting, all have done what
/// can fail; and after it all are connected, as one that ended at once would break the connections of the others.
GRADACCUM_INLINE Connections::Connections(const c10::intrusive_ptr<c10d::Store>& store, const std::string& host,
                                          const std::string& store_name, int rank, int world_size,
                                          std::chrono::milliseconds timeout, std::chrono::milliseconds patience)
    : rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      store_(store),
      heartbeat_(store->clone(), store_name, rank, world_size) {  // calls of one connection wait for each other
  try {
    meet("to start", patience);
    const auto gradients = prepare_gloo(store, "gradients", host, rank, world_size, timeout);
    const auto agreement = prepare_gloo(store, "agreement", host, rank, world_size, timeout);
    meet("to open their network interfaces", patience);
    gradients_ = gradients();
    agreement_ = agreement();
    meet("to connect", patience);
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
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
  try {
    nccl_ = std::make_unique<NcclConnection>(store_->clone(), rank_, world_size_, own, timeout_);
    if (!heartbeat_.poll([&] { return nccl_->answers(); }, timeout_)) fail(heartbeat_.explain(), "NCCL to connect");
    nccl_->check();
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
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
  environment.local_rank = environment.world_size == 1 ? 0 : -1;
  for (const auto* const variable : found->local_rank)
    if (environment.local_rank < 0 && lookup(variable)) environment.local_rank = number(variable, 0, environment.rank);
  if (environment.world_size == 1) return environment;
  if (const auto address = lookup("MASTER_ADDR")) {
    environment.address = *address;
  } else {
    const bool by_step = lookup(slurm->rank) == lookup(found->rank) &&            // not that of a daemon
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

/// Returns a socket for a store on a loopback address; -1 if there is none, as when a store of this process has the
/// port. LibTorch's own socket is open to other machines. It also gives clients of IPv4 an address of IPv6, which is
/// not in /etc/hosts: then the store's only thread asks DNS for the name of each that connects, which may take seconds.
GRADACCUM_INLINE int loopback_socket(const std::string& host, std::uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return -1;
  const auto end = c10::make_scope_exit([found] { freeaddrinfo(found); });
  const int descriptor = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(descriptor, found->ai_addr, found->ai_addrlen) == 0) return descriptor;
  close(descriptor);
  return -1;
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
  const bool on_loopback = options.isServer && is_loopback(environment.address);
  const int own = on_loopback ? loopback_socket(environment.address, environment.port) : -1;
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
      lower += text_at(store, host_key(other)) == host;
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

GRADACCUM_INLINE void check_dense(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided, "ProcessGroup: a tensor must be defined and dense");
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE ProcessGroup ProcessGroup::from_environment(ProcessGroupOptions options) {
  const auto lookup = [](const std::string& variable) -> std::optional<std::string> {
    if (const char* const value = std::getenv(variable.c_str())) return value;
    return std::nullopt;
  };
  return ProcessGroup(detail::launch_environment(lookup), options);
}

GRADACCUM_INLINE ProcessGroup::ProcessGroup(const detail::LaunchEnvironment& environment, ProcessGroupOptions options)
    : rank_(environment.rank), world_size_(environment.world_size), local_rank_(environment.local_rank) {
  if (world_size_ == 1) return;
  const auto blocked = detail::block_sigpipe();
  const auto store_name = c10::str(environment.launcher_has_store ? "the launcher" : "rank 0", " (its store at ",
                                   environment.address, ":", environment.port, ")");
  auto store = detail::open_store(environment, store_name, options.timeout);
  static std::atomic<int> groups = 0;
  const auto prefix = detail::plain_text("gradaccum/", environment.attempt, "/", groups++);
  store = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  detail::put(*store, detail::host_key(rank_), detail::machine_name());
  // Connecting comes last: after it, rank 0 may end, and its store with it.
  if (local_rank_ < 0) local_rank_ = detail::local_rank_by_host(*store, rank_, detail::machine_name());
  connections_ = std::make_shared<detail::Connections>(store, environment.address, store_name, rank_, world_size_,
                                                       options.timeout);
}

GRADACCUM_INLINE ProcessGroup::ProcessGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            ProcessGroupOptions options)
    : rank_(rank), world_size_(world_size), local_rank_(rank) {
  TORCH_CHECK(1 <= world_size && world_size <= detail::most_ranks, "ProcessGroup: world_size must be from 1 to ",
              detail::most_ranks, ", got ", world_size);
  TORCH_CHECK(0 <= rank && rank < world_size, "ProcessGroup: rank must be in [0, ", world_size, "), got ", rank);
  if (world_size == 1) return;
  const auto blocked = detail::block_sigpipe();
  connections_ =
      std::make_shared<detail::Connections>(store, "127.0.0.1", "its place", rank, world_size, options.timeout);
}

GRADACCUM_INLINE at::Device ProcessGroup::device() const {
  if (!at::globalContext().hasCUDA()) return at::Device(at::kCPU);
  return at::Device(at::kCUDA, detail::device_index(local_rank_, at::detail::getCUDAHooks().getNumGPUs()));
}

GRADACCUM_INLINE void ProcessGroup::all_reduce(const at::Tensor& tensor) const {
  detail::check_dense(tensor);
  if (connections_) connections_->all_reduce(tensor);
}

GRADACCUM_INLINE void ProcessGroup::broadcast(const at::Tensor& tensor, int from) const {
  detail::check_dense(tensor);
  if (connections_) connections_->broadcast(tensor, from);
}

GRADACCUM_INLINE std::vector<at::Tensor> ProcessGroup::all_gather(const at::Tensor& tensor) const {
  detail::check_dense(tensor);
  return connections_ ? connections_->all_gather(tensor) : std::vector{tensor.detach().contiguous().clone()};
}

GRADACCUM_INLINE std::vector<std::string> ProcessGroup::all_gather(const std::string& text) const {
  return connections_ ? connections_->all_gather(text) : std::vector{text};
}

GRADACCUM_INLINE void ProcessGroup::barrier() const { all_reduce(at::zeros({1})); }

}  // namespace gradaccum

#undef GRADACCUM_INLINE
