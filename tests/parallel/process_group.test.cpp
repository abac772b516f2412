// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/parallel/connections.hpp>
#include <gradaccum/detail/parallel/rendezvous.hpp>
#include <gradaccum/detail/parallel/replica_communicator.hpp>
#include <gradaccum/detail/platform/sockets.hpp>
#include <gradaccum/process_group.hpp>

#include "support/no_threads.hpp"
#include "support/ranks.hpp"
#include "support/relay.hpp"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sanitizer/lsan_interface.h>
#include <signal.h>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

namespace {

inner::LaunchEnvironment read(const std::map<std::string, std::string>& variables) {
  return inner::launch_environment([&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

/// Returns the threads of this process, and whether each has blocked SIGPIPE.
std::map<std::string, bool> blocked_by_thread() {
  std::map<std::string, bool> result;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(thread.path() / "status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("SigBlk:"))
        result[thread.path().filename()] = (std::stoull(line.substr(7), nullptr, 16) >> (SIGPIPE - 1)) % 2 == 1;
  }
  return result;
}

}  // namespace

TEST_CASE("ProcessGroup: reads the environment variables of launchers") {
  CHECK(read({}).world_size == 1);
  const auto torchrun = read({{"RANK", "3"},
                              {"WORLD_SIZE", "4"},
                              {"LOCAL_RANK", "1"},
                              {"MASTER_ADDR", "node0"},
                              {"MASTER_PORT", "29500"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                              {"SLURM_PROCID", "0"},  // torchrun inside of a srun step
                              {"SLURM_STEP_NUM_TASKS", "2"}});
  CHECK(torchrun.rank == 3);
  CHECK(torchrun.world_size == 4);
  CHECK(torchrun.local_rank == 1);
  CHECK(torchrun.address == "node0");
  CHECK(torchrun.port == 29500);
  CHECK(torchrun.launcher_has_store);
  CHECK(torchrun.attempt == "2");

  const auto kubeflow =
      read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "job-master-0"}, {"MASTER_PORT", "23456"}});
  CHECK(kubeflow.rank == 1);
  CHECK(kubeflow.local_rank == -1);  // derived from host names
  CHECK_FALSE(kubeflow.launcher_has_store);

  std::map<std::string, std::string> slurm{{"SLURM_PROCID", "5"},
                                           {"SLURM_STEP_NUM_TASKS", "8"},
                                           {"SLURM_LOCALID", "1"},
                                           {"SLURM_JOB_ID", "4321"},
                                           {"SLURM_STEP_NODELIST", "gpu[07-09,12],login"}};
  CHECK(read(slurm).rank == 5);
  CHECK(read(slurm).local_rank == 1);
  CHECK(read(slurm).address == "gpu07");
  CHECK(read(slurm).port == 15000 + 4321);
  slurm["SLURM_STEP_NODELIST"] = "alpha,beta";
  CHECK(read(slurm).address == "alpha");
  slurm["SLURM_STEP_NODELIST"] = "alpha,beta[1-2]";
  CHECK(read(slurm).address == "alpha");
  slurm["MASTER_PORT"] = "4000";
  CHECK(read(slurm).port == 4000);
  slurm.erase("SLURM_STEP_NUM_TASKS");  // a batch script, not started by srun
  CHECK(read(slurm).world_size == 1);
  CHECK(read({{"OMPI_COMM_WORLD_RANK", "1"},
              {"OMPI_COMM_WORLD_SIZE", "2"},
              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
              {"MASTER_ADDR", "a"},
              {"MASTER_PORT", "1"}})
            .rank == 1);
}

TEST_CASE("ProcessGroup: reads the variables of each launcher, and of nested ones the innermost") {
  struct Launcher {
    std::string name, rank, world_size, local_rank;
  };
  const auto launcher = GENERATE(from_range(
      std::vector<Launcher>{{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
                            {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                            {"MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
                            {"MVAPICH 3", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_RANK"},
                            {"MPICH, Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
                            {"Cray PALS with PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"},
                            {"Cray PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"},
                            {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"},
                            {"Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"},
                            {"PMIx", "PMIX_RANK", "WORLD_SIZE", "PMIX_LOCAL_RANK"},
                            {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}}));
  CAPTURE(launcher.name);
  std::map<std::string, std::string> variables{{"MASTER_ADDR", "a"},           {"MASTER_PORT", "1"},
                                               {"SLURM_PROCID", "0"},          {"SLURM_STEP_NUM_TASKS", "2"},
                                               {"SLURM_STEP_NODELIST", "b,c"}, {"SLURM_JOB_ID", "7"}};
  variables[launcher.rank] = "5", variables[launcher.world_size] = "8", variables[launcher.local_rank] = "1";
  const auto found = read(variables);
  CHECK(found.rank == 5);
  CHECK(found.world_size == 8);
  CHECK(found.local_rank == 1);
  variables.erase(launcher.local_rank);
  CHECK(read(variables).local_rank == -1);
  variables.erase("MASTER_ADDR");
  if (launcher.name == "srun")
    CHECK(read(variables).address == "b");
  else  // the step may consist of daemons with other nodes
    REQUIRE_ERROR("must set MASTER_ADDR", read(variables));
  if (launcher.name == "srun") return;
  std::map<std::string, std::string> half{{launcher.rank, "0"}};
  REQUIRE_ERROR(launcher.rank + " without " + launcher.world_size + "; set both, or neither", read(half));
  half = {{launcher.world_size, "2"}};
  REQUIRE_ERROR("the environment has " + launcher.world_size + " without ", read(half));
}

TEST_CASE("ProcessGroup: a srun step is recognized even if its PMI sets variables, too") {
  CHECK(read({{"SLURM_PROCID", "5"},
              {"SLURM_STEP_NUM_TASKS", "8"},
              {"PMI_RANK", "5"},
              {"PMI_SIZE", "8"},
              {"SLURM_STEP_NODELIST", "b,c"},
              {"SLURM_JOB_ID", "7"}})
            .address == "b");
}

TEST_CASE("ProcessGroup: local ranks follow from host names and select devices") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<int> local;
  for (auto* const host : {"a", "b", "a", "a", "b"}) {
    const auto rank = static_cast<int>(local.size());
    store->set("host/" + std::to_string(rank), std::vector<std::uint8_t>{static_cast<std::uint8_t>(*host)});
    local.push_back(inner::local_rank_by_host(*store, rank, host));
  }
  CHECK(local == std::vector{0, 0, 1, 2, 1});
  store->setTimeout(std::chrono::milliseconds(10));
  REQUIRE_ERROR("ProcessGroup: rank 5 could not be reached by rank 6: it has not started or has ended: ",
                inner::local_rank_by_host(*store, 6, "a"));
  CHECK(inner::device_index(1, 2) == 1);
  REQUIRE_ERROR("local rank 1 must have a CUDA device of its own, but this process sees only 1",
                inner::device_index(1, 1));
}

TEST_CASE("ProcessGroup: a host name that resolves to a loopback address is replaced by the interface to other ranks") {
  CHECK(inner::address_towards("127.0.0.1") == "127.0.0.1");
  CHECK(inner::address_towards("127.0.1.1").starts_with("127.0."));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto publish = [&](int rank, const std::string& address) {
    store->set("address/" + std::to_string(rank), std::vector<std::uint8_t>(address.begin(), address.end()));
  };
  publish(1, "127.0.0.1");
  CHECK(inner::reachable_address(*store, "127.0.1.1", "127.0.1.1", 0, 2) == "127.0.0.1");  // all ranks on one machine
  const std::string elsewhere = "198.51.100.7";                                            // reserved for documentation
  const auto own = inner::address_towards(elsewhere);
  publish(1, elsewhere);
  if (own.empty()) {
    REQUIRE_ERROR("no network interface reaches rank 1 at 198.51.100.7",
                  inner::reachable_address(*store, "127.0.1.1", "127.0.1.1", 0, 2));
    return;
  }
  CHECK(inner::reachable_address(*store, "127.0.1.1", "127.0.1.1", 0, 2) == own);  // on rank 0's machine
  CHECK(inner::reachable_address(*store, "127.0.1.1", elsewhere, 2, 3) == own);    // on another
  CHECK(inner::reachable_address(*store, own, "127.0.1.1", 0, 2) == own);          // the name resolves to it
}

TEST_CASE("ProcessGroup: a contradictory environment is refused with the variable's name") {
  std::map<std::string, std::string> good{
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1234"}};
  CHECK(read(good).rank == 1);
  const auto with = [&](const std::string& name, const std::string& value) {
    auto changed = good;
    changed[name] = value;
    return changed;
  };
  const auto without = [&](const std::string& name) {
    auto changed = good;
    changed.erase(name);
    return changed;
  };
  REQUIRE_ERROR("RANK must be a number from 0 to 1, got '2'", read(with("RANK", "2")));
  REQUIRE_ERROR("RANK must be a number from 0 to 1, got '-1'", read(with("RANK", "-1")));
  REQUIRE_ERROR("got '1x'", read(with("RANK", "1x")));
  REQUIRE_ERROR("got ''", read(with("RANK", "")));
  REQUIRE_ERROR("WORLD_SIZE must be a number from 1", read(with("WORLD_SIZE", "0")));
  REQUIRE_ERROR("MASTER_PORT must be a number from 1 to 65535", read(with("MASTER_PORT", "65536")));
  REQUIRE_ERROR("LOCAL_RANK must be a number from 0 to 1", read(with("LOCAL_RANK", "2")));
  REQUIRE_ERROR("must set MASTER_ADDR", read(without("MASTER_ADDR")));
  REQUIRE_ERROR("must set MASTER_PORT", read(without("MASTER_PORT")));
  REQUIRE_ERROR("WORLD_SIZE without RANK; set both, or neither", read(without("RANK")));
  REQUIRE_ERROR("RANK without WORLD_SIZE", read(without("WORLD_SIZE")));
  REQUIRE_ERROR("MASTER_ADDR must be the host of rank 0, got ''", read(with("MASTER_ADDR", "")));
  CHECK(read(with("WORLD_SIZE", "65536")).world_size == 65536);
  for (auto* const size : {"65537", "5000000", "99999999999999999999"})
    REQUIRE_ERROR("WORLD_SIZE must be a number from 1 to 65536, got '" + std::string(size) + "'",
                  read(with("WORLD_SIZE", size)));
  REQUIRE_ERROR("world_size must be from 1 to 65536, got 65537",
                ga::ProcessGroup(c10::make_intrusive<c10d::HashStore>(), 0, 65537));
}

TEST_CASE("ProcessGroup: an address without a rank is refused as from an unknown launcher") {
  const auto unknown = GENERATE(std::map<std::string, std::string>{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}},
                                std::map<std::string, std::string>{{"MASTER_ADDR", "a"}},
                                std::map<std::string, std::string>{{"MASTER_ADDR", "a"}, {"SLURM_PROCID", "0"}});
  REQUIRE_ERROR(
      "the environment has MASTER_ADDR, but no launcher that is known has set the rank of this process; set "
      "RANK and WORLD_SIZE for each process, or, to train alone, unset MASTER_ADDR",
      read(unknown));
  CHECK(read({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}}).world_size == 1);
}

namespace {

sockaddr_in ipv4(std::uint32_t address, std::uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_addr.s_addr = htonl(address);
  result.sin_port = htons(port);
  return result;
}

/// A socket on a free port of 127.0.0.1.
struct BoundSocket {
  BoundSocket() {
    auto address = ipv4(INADDR_LOOPBACK, 0);
    socklen_t size = sizeof address;
    tests::Socket::require(::bind(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), size));
    tests::Socket::require(::getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), &size));
    port = ntohs(address.sin_port);
  }
  tests::Socket socket = tests::Socket::of_tcp();
  std::uint16_t port = 0;
};

bool answers(std::uint32_t address, std::uint16_t port) {
  const auto socket = tests::Socket::of_tcp();
  const auto to = ipv4(address, port);
  return ::connect(socket.descriptor(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
}

inner::LaunchEnvironment of_two(int rank, std::string address, std::uint16_t port) {
  inner::LaunchEnvironment environment;
  environment.rank = rank;
  environment.world_size = 2;
  environment.address = std::move(address);
  environment.port = port;
  return environment;
}

/// Runs `then` at the first warning, in the thread that warns.
class AtWarning : private c10::WarningHandler {
 public:
  explicit AtWarning(std::function<void()> then) : then_(std::move(then)) {}
  void process(const c10::Warning& warning) override {
    text += warning.msg();
    if (then_) std::exchange(then_, nullptr)();
  }
  std::string text;

 private:
  std::function<void()> then_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace

TEST_CASE("ProcessGroup: a store on a loopback address is not open to other machines") {
  const auto host = GENERATE(as<std::string>{}, "127.0.0.1", "localhost", "every address");
  const bool is_loopback = host != "every address";
  const auto port = BoundSocket().port;
  const auto environment = of_two(0, is_loopback ? host : "0.0.0.0", port);
  const auto first = inner::open_store(environment, "rank 0", std::chrono::seconds(60));
  const auto second = inner::open_store(environment, "rank 0", std::chrono::seconds(60));  // for a second group
  first->set("key", std::string("value"));
  CHECK(second->get_to_str({"key"}) == "value");
  CHECK(answers(INADDR_LOOPBACK + 1, port) != is_loopback);  // 127.0.0.2, on which nothing else listens
}

TEST_CASE("ProcessGroup: a port in use by another program is named") {
  const auto host = GENERATE(as<std::string>{}, "127.0.0.1", "0.0.0.0");
  const BoundSocket other;
  tests::Socket::require(::listen(other.socket.descriptor(), 1));
  const auto error =
      testing::error_of([&] { inner::open_store(of_two(0, host, other.port), "rank 0", std::chrono::seconds(60)); });
  CHECK(error == "ProcessGroup: rank 0 must open its store at port " + std::to_string(other.port) +
                     ", which another program uses; set another MASTER_PORT");
}

TEST_CASE("ProcessGroup: a rank that waits for the store prints it, and connects when the store exists") {
  const auto port = BoundSocket().port;
  c10::intrusive_ptr<c10d::Store> store;
  AtWarning warning([&] { store = inner::open_store(of_two(0, "127.0.0.1", port), "", std::chrono::seconds(60)); });
  const auto reached = inner::open_store(of_two(1, "127.0.0.1", port), "rank 0 (its store at here)",
                                         std::chrono::seconds(60), std::chrono::milliseconds(50));
  REQUIRE(store);
  CHECK(testing::contains(warning.text,
                          "ProcessGroup: rank 1 has not reached rank 0 (its store at here) after 0.05 s: it has not "
                          "started or has ended, MASTER_ADDR does not lead to it, or another program has its port"));
}

TEST_CASE("ProcessGroup: an unreachable address is an error after the timeout") {
  const auto port = BoundSocket().port;
  for (const int rank : {0, 1})
    REQUIRE_ERROR(
        "ProcessGroup: rank " + std::to_string(rank) + " could not reach rank 0: ",
        inner::open_store(of_two(rank, "no-such-host.invalid", port), "rank 0", std::chrono::milliseconds(1000)));
}

TEST_CASE("ProcessGroup: failure to start a thread is an error that says so") {
  const std::string text = "ProcessGroup: must start a thread, but the system has none left (";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto environment = of_two(0, "127.0.0.1", BoundSocket().port);
  const testing::NoThreads none;
  REQUIRE_ERROR(text, inner::Heartbeat(store, "here", 0, 2));
  REQUIRE_ERROR(text, inner::open_store(environment, "rank 0", std::chrono::seconds(60)));
  REQUIRE_ERROR(text, ga::ProcessGroup(store, 0, 2));
}

namespace {

void check_exchanges(const ga::ProcessGroup& group, at::Device device) {
  const double rank = group.rank(), sum = group.world_size() * (group.world_size() - 1) / 2.0;
  const auto full = [&](at::IntArrayRef shape, double value, at::ScalarType dtype = at::kFloat) {
    return torch::full(shape, value, at::TensorOptions(dtype).device(device));
  };
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kByte}) {
    auto tensor = full({3, 2}, rank, dtype);
    group.all_reduce(tensor);
    TORCH_CHECK(torch::equal(tensor, full({3, 2}, sum, dtype)), dtype);
  }
  auto strided = full({4, 4}, rank, at::kDouble);
  group.all_reduce(strided.t().narrow(0, 1, 2));
  TORCH_CHECK(strided.sum().item<double>() == 8 * sum + 8 * rank);
  auto scalar = full({}, rank, at::kDouble);
  group.all_reduce(scalar);
  TORCH_CHECK(scalar.item<double>() == sum);
  group.all_reduce(full({0}, 0));

  auto own = full({2}, rank);
  group.broadcast(own, group.world_size() - 1);
  TORCH_CHECK(torch::equal(own, full({2}, group.world_size() - 1.0)));
  const auto all = group.all_gather(full({2}, rank));
  TORCH_CHECK(all.size() == static_cast<std::size_t>(group.world_size()));
  for (std::size_t i = 0; i < all.size(); ++i) TORCH_CHECK(torch::equal(all[i], full({2}, static_cast<double>(i))));
}

}  // namespace

TEST_CASE("ProcessGroup: sums, broadcasts, gathers, of any layout and dtype") {
  const int world_size = GENERATE(1, 2, 5);
  tests::as_ranks(world_size, [&](const ga::ProcessGroup& group) {
    check_exchanges(group, at::kCPU);
    const auto texts = group.all_gather(std::string(static_cast<std::size_t>(group.rank()), 'x'));
    for (std::size_t i = 0; i < texts.size(); ++i) TORCH_CHECK(texts[i] == std::string(i, 'x'));
    group.barrier();
    bool refused = false;
    try {
      group.all_reduce(torch::eye(2).to_sparse());
    } catch (const c10::Error& error) {
      refused = std::string(error.what()).find("a tensor must be defined and dense") != std::string::npos;
    }
    TORCH_CHECK(refused);
  });
}

TEST_CASE("ProcessGroup: NCCL is used if each rank has its own device") {
  CHECK(ga::detail::each_has_its_own({"a/0", "a/1", "b/0"}));
  CHECK_FALSE(ga::detail::each_has_its_own({"a/0", "a/1", "a/0"}));
  CHECK_FALSE(ga::detail::each_has_its_own({"a/0", "", "b/0"}));
  CHECK_FALSE(ga::detail::each_has_its_own({"", ""}));
  CHECK(ga::detail::device_name({}).empty());
  CHECK(ga::detail::device_name({torch::ones({2})}).empty());
}

TEST_CASE("ProcessGroup: collectives accept tensors of a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  tests::as_ranks(2, [](const ga::ProcessGroup& group) { check_exchanges(group, torch::Device("cuda:0")); });
}

TEST_CASE("ProcessGroup: packed values are unpacked unchanged") {
  ga::Archive::Values values{{"flag", true},
                             {"whole", std::int64_t{-7}},
                             {"real", std::numeric_limits<double>::infinity()},
                             {"text", std::string("a\0\nb", 4)},
                             {"none", at::Tensor()}};
  const auto bytes = inner::pack(values);
  auto other = inner::unpack(bytes);
  CHECK(std::get<bool>(other.at("flag")));
  CHECK(std::get<std::int64_t>(other.at("whole")) == -7);
  CHECK(std::get<double>(other.at("real")) == std::numeric_limits<double>::infinity());
  CHECK(std::get<std::string>(other.at("text")) == std::string("a\0\nb", 4));
  CHECK_FALSE(std::get<at::Tensor>(other.at("none")).defined());
  CHECK_THROWS(inner::pack({{"tensor", torch::ones({2})}}));  // tensors are written per rank
  for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
    try {
      static_cast<void>(inner::unpack(bytes.substr(0, cut)));
    } catch (const c10::Error&) {
    }
  }
}

TEST_CASE("ProcessGroup: a silent rank is named to all others") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  {
    inner::Heartbeat first(store, "here", 0, 4), second(store, "here", 1, 4), third(store, "here", 2, 4);
    CHECK(first.explain() == "rank 3 has ended or hangs");
    CHECK_FALSE(third.wait([] { return false; }));  // returns without a signal
    CHECK(third.explain() == "rank 3 has ended or hangs");
  }
  const auto other = c10::make_intrusive<c10d::HashStore>();
  inner::Heartbeat first(other, "here", 0, 4), second(other, "here", 1, 4);
  CHECK(second.explain() == "ranks 2, 3 have ended or hang");
}

TEST_CASE("ProcessGroup: an NCCL failure on one rank is reported to the others immediately") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      errors[static_cast<std::size_t>(rank)] = testing::error_of([&] {
        inner::Connections connections(store, "127.0.0.1", "its place", rank, 2, std::chrono::seconds(60));
        if (rank == 1) connections.connect_devices({"one", "another"}, at::Device(at::kCUDA, 0));
        connections.all_reduce(torch::zeros({1}));
      });
    });
  for (auto& thread : threads) thread.join();
  CHECK_FALSE(errors[1].empty());
  CHECK(testing::contains(errors[0], "rank 1 has given up: " + errors[1].substr(0, 20)));
}

TEST_CASE("ProcessGroup: a rank that gives up tells the others the reason") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  inner::Heartbeat first(store, "here", 0, 2), second(store, "here", 1, 2);
  second.announce("rank 1 has given up: of a test");
  CHECK_FALSE(first.wait([] { return false; }));
  CHECK(first.explain() == "rank 1 has given up: of a test");
}

TEST_CASE("ProcessGroup: a rank that ends immediately does not prevent the others from connecting") {
  for (int attempt = 0; attempt < 20; ++attempt) {
    std::vector<int> connected(3);
    tests::as_ranks(3, [&](const ga::ProcessGroup& group) { ++connected[static_cast<std::size_t>(group.rank())]; });
    CHECK(connected == std::vector{1, 1, 1});
  }
}

TEST_CASE("ProcessGroup: a connection closed by another process does not raise SIGPIPE here") {
  const auto before = blocked_by_thread();
  std::map<std::string, bool> own;
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 0) own = blocked_by_thread();
    group.barrier();
  });
  std::size_t open = 0, started = 0;
  for (const auto& [thread, blocked] : own) {
    started += !before.contains(thread);
    open += !before.contains(thread) && !blocked;
  }
  CHECK(started > 2);
  CHECK(open == 2);  // the test's two threads, whose mask is unchanged
}

TEST_CASE("ProcessGroup: a rank that never joins is named") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error = testing::error_of([&] { ga::ProcessGroup(store, 0, 2, {.timeout = std::chrono::seconds(1)}); });
  CHECK(testing::contains(error, "rank 1 has ended or hangs (rank 0 of 2 waited for all ranks to start)"));
}

TEST_CASE("ProcessGroup: rank 0 prints the ranks that it waits for") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [&](int rank, std::chrono::milliseconds patience) {
    inner::Connections(store, "127.0.0.1", "its place", rank, 2, std::chrono::seconds(60), patience);
  };
  std::thread other;
  AtWarning warning([&] { other = std::thread([&] { connect(1, std::chrono::seconds(60)); }); });
  connect(0, std::chrono::milliseconds(50));
  REQUIRE(other.joinable());
  other.join();
  CHECK(testing::contains(warning.text, "rank 0 waits for all ranks to start: after 0.05 s 1 of 2 have; it gives up"));
}

TEST_CASE("ProcessGroup: a rank that fails to connect ends the others' wait") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->add("to start", 1);  // rank 0, in place of a process
  ::setenv("GLOO_SOCKET_IFNAME", "no-such-card", 1);
  const auto error = testing::error_of([&] {
#ifdef __SANITIZE_ADDRESS__
    const __lsan::ScopedDisabler gloo_loses_the_list_of_interfaces;
#endif
    ga::ProcessGroup(store, 1, 2, {.timeout = std::chrono::seconds(60)});
  });
  ::unsetenv("GLOO_SOCKET_IFNAME");
  CHECK(testing::contains(error, "ProcessGroup: rank 1 could not open its network interface (GLOO_SOCKET_IFNAME"));
  REQUIRE(store->check({"failure"}));
  CHECK(testing::contains(store->get_to_str({"failure"}), "rank 1 has given up: " + error.substr(0, 60)));
  REQUIRE_ERROR("rank 1 has given up: ProcessGroup: rank 1 could not open its network interface",
                ga::ProcessGroup(store, 0, 2, {.timeout = std::chrono::hours(1)}));
}

TEST_CASE("ProcessGroup: a failing rank ends the others' wait, and they stop communicating") {
  std::vector<std::string> errors(3);
  tests::as_ranks(3, [&](const ga::ProcessGroup& group) {
    if (group.rank() == 1) return;  // closes its connections
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        group.barrier();
      } catch (const c10::Error& error) {
        errors[static_cast<std::size_t>(group.rank())] += error.what_without_backtrace();
      }
    }
  });
  for (int rank : {0, 2}) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    CHECK(
        testing::contains(error, "rank 1 has ended or hangs (rank " + std::to_string(rank) + " of 3 waited for a sum"));
    CHECK(testing::contains(error, "no data can be exchanged after an error"));
  }
}
