// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/memory/page_allocator.hpp>
#include <gradaccum/memory_meter.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace ga = gradaccum;
using ga::detail::FreeRanges;
using ga::detail::PageAllocator;

namespace {

/// A block with a unique number in each of its pages.
struct Filled {
  std::uint64_t* begin;
  std::size_t bytes;
  std::uint64_t number;

  static constexpr std::size_t step = 4096 / sizeof(std::uint64_t);

  std::size_t count() const { return bytes / sizeof(std::uint64_t); }
  void fill() const {
    for (std::size_t i = 0; i < count(); i += step) begin[i] = number;
    begin[count() - 1] = number;
  }
  bool is_intact() const {
    for (std::size_t i = 0; i < count(); i += step)
      if (begin[i] != number) return false;
    return begin[count() - 1] == number;
  }
};

Filled filled(PageAllocator& pages, std::size_t bytes, std::uint64_t number) {
  Filled block{static_cast<std::uint64_t*>(pages.allocate(bytes)), bytes, number};
  REQUIRE(block.begin);
  block.fill();
  return block;
}

}  // namespace

TEST_CASE("FreeRanges: neighbors are merged, and the smallest sufficient range is used") {
  FreeRanges free;
  free.add({100, 10});
  free.add({120, 30});
  free.add({200, 15});
  CHECK(free.take(11)->address == 200);
  CHECK(free.bytes() == 44);
  free.add({110, 10});  // between two
  CHECK(free.take(50)->address == 100);
  CHECK_FALSE(free.take(5));
  const auto end = free.take_from_largest(3);
  CHECK((end.address == 212 && end.bytes == 3));
  CHECK(free.take_from_largest(100).bytes == 1);
  CHECK(free.take_from_largest(1).bytes == 0);
  CHECK(free.bytes() == 0);
}

TEST_CASE("PageAllocator: blocks keep their content, and the total stays within a tenth above the most that was used") {
  for (int seed = 0; seed < 5; ++seed) {
    std::mt19937_64 lot(seed);
    PageAllocator pages;
    std::vector<Filled> blocks;
    std::size_t used = 0, most_used = 0, most_resident = 0;
    const auto before = *ga::detail::occupied_memory(at::kCPU);
    for (std::uint64_t i = 0; i < 2000; ++i) {
      if (lot() % 2 == 0 || blocks.empty()) {
        const auto bytes = 8 * (1 + lot() % (lot() % 10 == 0 ? 1 << 18 : 1 << 14));
        blocks.push_back(filled(pages, bytes, i));
        used += bytes;
      } else {
        std::swap(blocks[lot() % blocks.size()], blocks.back());
        REQUIRE(blocks.back().is_intact());
        REQUIRE(pages.has(blocks.back().begin));
        pages.free(blocks.back().begin);
        REQUIRE_FALSE(pages.has(blocks.back().begin));
        used -= blocks.back().bytes;
        blocks.pop_back();
      }
      most_used = std::max(most_used, pages.used_bytes());
      most_resident = std::max(most_resident, pages.resident_bytes());
      REQUIRE(pages.used_bytes() >= used);
      REQUIRE(pages.used_bytes() <= used + (1 << 16) * blocks.size());
      REQUIRE(pages.resident_bytes() <= most_used + most_used / 10 + (16 << 20));
    }
    CHECK(most_resident > most_used);  // some freed memory was kept
    const auto grown = *ga::detail::occupied_memory(at::kCPU) - before;
    CHECK(grown <= static_cast<std::int64_t>(pages.resident_bytes()) + (16 << 20));
    for (auto& block : blocks) pages.free(block.begin);
    CHECK(pages.used_bytes() == 0);
  }
}

TEST_CASE("PageAllocator: a freed block is reused with its pages; pages beyond the limit are returned to the kernel") {
  PageAllocator pages;
  constexpr std::size_t large = 64 << 20, small = 8 << 20;
  void* const first = pages.allocate(large);
  std::memset(first, 1, large);
  pages.free(first);
  CHECK(pages.resident_bytes() == large);
  CHECK(pages.allocate(large) == first);
  pages.free(first);
  std::vector<void*> blocks;
  for (int i = 0; i < 7; ++i) blocks.push_back(pages.allocate(small + 4096));  // split the large one
  CHECK(pages.resident_bytes() == large);
  void* const again = pages.allocate(large);  // another address
  CHECK(pages.resident_bytes() <= pages.used_bytes() + pages.used_bytes() / 10 + (16 << 20));
  const auto* const bytes = static_cast<const char*>(again);
  CHECK(std::all_of(bytes, bytes + large, [](char byte) { return byte == 0; }));  // the kernel cleared it
  CHECK_FALSE(pages.allocate(std::size_t{1} << 60));
  CHECK_FALSE(pages.allocate(~std::size_t{0}));
}

TEST_CASE("PageAllocator: memory returns to the kernel on request, and with the allocator") {
  constexpr std::size_t large = 64 << 20, little = 8 << 20;
  const auto before = *ga::detail::occupied_memory(at::kCPU);
  const auto occupied = [&] { return static_cast<std::size_t>(*ga::detail::occupied_memory(at::kCPU) - before); };
  const auto filled = [](PageAllocator& pages) {
    void* const block = pages.allocate(large);
    std::memset(block, 1, large);
    return block;
  };
  {
    PageAllocator pages;
    pages.free(filled(pages));
    CHECK((pages.resident_bytes() == large && occupied() > large - little));
  }
  CHECK(occupied() < little);
  PageAllocator pages;
  void *const one = filled(pages), *const other = filled(pages);
  pages.free(one);
  pages.stop_keeping();
  CHECK((pages.resident_bytes() == large && occupied() < large + little));
  pages.free(other);
  CHECK((pages.resident_bytes() == 0 && occupied() < little));
}

TEST_CASE("keep_freed_memory: large tensors are kept, counted, and freed by any thread") {
  auto from_before = torch::ones({1 << 20});
  REQUIRE(ga::keep_freed_memory());
  REQUIRE(ga::keep_freed_memory());
  from_before.reset();
  ga::MemoryMeter meter;
  auto tensor = torch::ones({1 << 20});
  CHECK(meter.live_bytes() == 4 << 20);
  const void* const address = tensor.const_data_ptr();
  tensor.reset();
  CHECK(meter.live_bytes() == 0);
  tensor = torch::empty({1 << 20});
  CHECK(tensor.const_data_ptr() == address);
  tensor.resize_({3 << 20}).fill_(2);
  CHECK(tensor.sum().item<double>() == 6 << 20);
  std::thread([taken = std::exchange(tensor, {})]() mutable { taken.reset(); }).join();
  CHECK(torch::ones({4}).sum().item<double>() == 4);
#ifndef __SANITIZE_ADDRESS__  // ends the program for such a size
  REQUIRE_ERROR("you tried to allocate", torch::empty({std::int64_t{1} << 58}, at::kByte));
#endif
}

TEST_CASE("keep_freed_memory: threads") {
  REQUIRE(ga::keep_freed_memory());
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int number = 0; number < 4; ++number)
    threads.emplace_back([number, &wrong] {
      std::vector<at::Tensor> tensors;
      for (int i = 0; i < 60; ++i) {
        tensors.push_back(torch::full({(1 << 18) + 1000 * i}, number * 100 + i));
        if (i % 3 == 2) tensors.erase(tensors.begin());
        for (auto& tensor : tensors)
          if (tensor[0].item<std::int64_t>() / 100 != number) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}
