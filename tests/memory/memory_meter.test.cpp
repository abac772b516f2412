// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/memory_meter.hpp>

#include "support/device.hpp"

#include <ATen/ThreadLocalState.h>

#include <map>
#include <random>
#include <thread>

namespace ga = gradaccum;

TEST_CASE("MemoryMeter: counts live and peak bytes exactly") {
  ga::MemoryMeter meter;
  CHECK(meter.live_bytes() == 0);
  auto a = torch::empty({1000}, at::kFloat);
  CHECK(meter.live_bytes() == 4000);
  {
    auto b = torch::empty({500}, at::kDouble);
    CHECK(meter.live_bytes() == 8000);
  }
  CHECK(meter.live_bytes() == 4000);
  CHECK(meter.peak_bytes() == 8000);
  CHECK(meter.live_bytes(at::kCPU) == 4000);
  CHECK(meter.peak_bytes(at::kCPU) == 8000);
  CHECK(meter.peak_bytes(at::Device("cuda:0")) == 0);
  meter.reset_peak();
  CHECK(meter.peak_bytes() == 4000);
}

TEST_CASE("MemoryMeter: the arithmetic of a forward pass") {
  auto net = torch::nn::Sequential(torch::nn::Linear(256, 1024), torch::nn::GELU(), torch::nn::Linear(1024, 256));
  auto x = torch::randn({64, 256});
  ga::MemoryMeter meter;
  auto y = net->forward(x);
  CHECK(meter.live_bytes() == 4 * 64 * (1024 + 1024 + 256));  // both hidden outputs are kept for backward
  y.sum().backward();
  std::int64_t parameters = 0;
  for (auto& p : net->parameters()) parameters += p.numel();
  y.reset();
  CHECK(meter.live_bytes() == 4 * parameters);  // the gradients
  CHECK(meter.peak_bytes() > 4 * parameters);
}

TEST_CASE("MemoryMeter: memory from before the scope does not count, even if it is freed") {
  auto before = torch::empty({1000}, at::kByte);
  ga::MemoryMeter meter;
  before.reset();
  CHECK(meter.live_bytes() == 0);
}

TEST_CASE("MemoryMeter: an address that had another size in an earlier scope") {
  at::Tensor block;
  {
    ga::MemoryMeter meter;
    block = torch::empty({4096}, at::kByte);
  }
  for (int i = 0; i < 50; ++i) {  // freed outside of a scope, and most likely reused
    block = torch::empty({4096 - i}, at::kByte);
    ga::MemoryMeter meter;
    block.reset();
    CHECK(meter.live_bytes() == 0);
  }
}

TEST_CASE("MemoryMeter: meters nest, and each counts its own scope") {
  ga::MemoryMeter outer;
  auto a = torch::empty({100}, at::kByte);
  {
    ga::MemoryMeter inner;
    auto b = torch::empty({50}, at::kByte);
    CHECK(inner.live_bytes() == 50);
    CHECK(outer.live_bytes() == 150);
  }
  CHECK(outer.live_bytes() == 100);
  CHECK(outer.peak_bytes() == 150);
  auto c = torch::empty({10}, at::kByte);  // the outer one continues after the inner
  CHECK(outer.live_bytes() == 110);
}

TEST_CASE("MemoryMeter: counts other threads with the thread's state, such as backward's") {
  ga::MemoryMeter meter;
  at::Tensor seen, unseen;
  const at::ThreadLocalState state;
  std::thread([&] {
    at::ThreadLocalStateGuard guard(state);
    seen = torch::empty({100}, at::kByte);
  }).join();
  CHECK(meter.live_bytes() == 100);
  std::thread([&] { unseen = torch::empty({100}, at::kByte); }).join();  // control
  CHECK(meter.live_bytes() == 100);
}

TEST_CASE("MemoryMeter: allocations of several threads add up") {
  ga::MemoryMeter meter;
  const at::ThreadLocalState state;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      at::ThreadLocalStateGuard guard(state);
      for (int i = 0; i < 1000; ++i) torch::empty({64}, at::kByte);
    });
  for (auto& thread : threads) thread.join();
  CHECK(meter.live_bytes() == 0);
  CHECK(meter.peak_bytes() >= 64);
  CHECK(meter.peak_bytes() <= 4 * 64);
}

TEST_CASE("MemoryMeter: nothing is counted, or accessed, after the scope") {
  at::Tensor kept;
  {
    ga::MemoryMeter meter;
    kept = torch::empty({100}, at::kByte);
  }
  kept.reset();
  ga::MemoryMeter again;
  CHECK(again.live_bytes() == 0);
}

TEST_CASE("MemoryMeter: refuses to start inside LibTorch's profiler") {
  struct Foreign : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t, std::size_t, std::size_t, c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
  };
  c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<Foreign>());
  REQUIRE_ERROR("MemoryMeter: must not start inside LibTorch's profiler", ga::MemoryMeter());
}

TEST_CASE("MemoryMeter: CUDA memory, and that of a backward on the device's thread", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  ga::MemoryMeter meter;
  auto x = torch::zeros({1 << 20}, at::kCUDA).set_requires_grad(true);
  CHECK(meter.live_bytes(x.device()) >= 4 * ga::MiB);
  CHECK(meter.live_bytes(x.device()) <= 5 * ga::MiB);  // CUDA's caching allocator may give blocks 1 MiB larger
  (x * 2).sum().backward();
  CHECK(meter.peak_bytes(x.device()) >= 8 * ga::MiB);
  x.reset();
  CHECK(meter.live_bytes(at::Device("cuda:0")) == 0);
}

TEST_CASE("MemoryMeter: counts the workspace that a thread's first matrix product allocates, and no older one",
          "[cuda]") {
  if (!testing::Workspaces::possible()) SKIP("needs the emulated device, whose workspaces a test can begin anew");
  const testing::Workspaces workspaces(ga::MiB);
  const auto x = torch::ones({2, 2}, at::kCUDA);
  for (const std::int64_t expected : {ga::MiB, std::int64_t{0}}) {
    const ga::MemoryMeter meter;
    static_cast<void>(x.mm(x));
    CHECK(meter.live_bytes(x.device()) == expected);
  }
}

TEST_CASE("MemoryMeter: its table of blocks behaves like a map, full or empty, in any order") {
  gradaccum::detail::BlockTable table;
  std::map<std::uintptr_t, std::int64_t> map;
  std::mt19937_64 random(1);
  for (const std::uintptr_t blocks : {40, 4000, 300}) {  // grows, and becomes empty again
    for (int i = 0; i < 40'000; ++i) {
      const auto block = 64 * (1 + random() % blocks);
      const auto bytes = static_cast<std::int64_t>(random() % 3);  // a third are erased
      const auto before = map.contains(block) ? map[block] : 0;
      REQUIRE(table.exchange(reinterpret_cast<const void*>(block), bytes) == before);
      if (bytes > 0) map[block] = bytes;
      if (bytes == 0) map.erase(block);
    }
    for (auto& [block, bytes] : map) REQUIRE(table.exchange(reinterpret_cast<const void*>(block), 0) == bytes);
    map.clear();
  }
}

TEST_CASE("peak_resident_memory: grows with written memory, and does not shrink") {
  const auto before = ga::peak_resident_memory();
  REQUIRE(before);
  CHECK(*before > 1 << 20);
  const std::int64_t bytes = *before;  // more than can have been freed since the peak
  { const auto block = torch::ones({bytes}, at::kByte); }
  const auto after = ga::peak_resident_memory();
  CHECK(*after >= bytes);
  CHECK(*after - *before > bytes / 2);
  CHECK(*after - *before < bytes * 2);
  CHECK(*ga::peak_resident_memory() >= *after);
}
