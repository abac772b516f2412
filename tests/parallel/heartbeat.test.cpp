// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/parallel/heartbeat.hpp>

#include "support/relay.hpp"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

namespace inner = gradaccum::detail;

namespace {

constexpr std::chrono::seconds silence{5};
const std::string gone = " has ended or hangs, or cannot be reached: silent for 5 s";
const auto never = [] { return false; };

c10::intrusive_ptr<c10d::TCPStore> tcp_store(std::uint16_t port, bool is_server) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// Rank 0, which has the store, and rank 1 at the other end of a link.
struct Two {
  explicit Two(std::chrono::milliseconds delay = {}) : relay(store->getPort(), delay) {}

  bool both_have_counted(std::int64_t beats) {
    return store->add("heartbeat/0", 0) >= beats && store->add("heartbeat/1", 0) >= beats;
  }

  c10::intrusive_ptr<c10d::TCPStore> store = tcp_store(0, true);
  tests::Relay relay;
  inner::Heartbeat first{store->clone(), "here", 0, 2, silence};
  inner::Heartbeat second{tcp_store(relay.port(), false), "there", 1, 2, silence};
};

}  // namespace

TEST_CASE("Heartbeat: a link that fails silently is detected at both ends, and nothing hangs") {
  Two two;
  while (!two.both_have_counted(2)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  two.relay.cut();
  CHECK_FALSE(two.second.wait(never));  // its thread is blocked in a system call
  CHECK(two.second.explain() == "there" + gone);
  CHECK_FALSE(two.first.wait(never));
  CHECK(two.first.explain() == "rank 1" + gone);
}

TEST_CASE("Heartbeat: a slow link does not count as lost") {
  Two two(std::chrono::milliseconds(250));
  const auto done = [&] { return two.both_have_counted(8); };  // twice the limit of silence
  CHECK(two.second.wait(done));
  CHECK(two.first.wait(done));
  CHECK_FALSE(two.store->check({"failure"}));
}

TEST_CASE("Heartbeat: a suspended rank is named even though its connections stay open") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int suspended = GENERATE(0, 1);
  store->add("heartbeat/" + std::to_string(suspended), 1);
  inner::Heartbeat other(store, "here", 1 - suspended, 3, silence), third(store, "here", 2, 3, silence);
  CHECK_FALSE(third.wait(never));
  CHECK(third.explain() == "rank " + std::to_string(suspended) + gone);
  CHECK_FALSE(other.wait(never));
  CHECK(other.explain() == "rank " + std::to_string(suspended) + gone);
}

TEST_CASE("Heartbeat: a rank that has not joined yet or has left is not reported") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  {
    inner::Heartbeat first(store, "here", 0, 3, silence);
    { const inner::Heartbeat third(store, "here", 2, 3, silence); }
    CHECK_FALSE(first.poll(never, silence + std::chrono::seconds(2)));
  }
  CHECK_FALSE(store->check({"failure"}));
}

TEST_CASE("Heartbeat: a rank that was suspended does not report others as silent") {
  inner::StallDetector others(std::chrono::milliseconds(1500));
  CHECK_FALSE(others.stalled(1));
  std::this_thread::sleep_for(std::chrono::seconds(2));
  CHECK_FALSE(others.stalled(1));
  while (!others.stalled(1)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_FALSE(others.stalled(2));
}
