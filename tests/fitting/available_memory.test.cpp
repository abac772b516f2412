// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/fitting/memory_fitter.hpp>

#include "support/control_groups.hpp"

#include <exception>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>

namespace inner = gradaccum::detail;

namespace {

struct MemoryGroups : testing::ControlGroups {
  using ControlGroups::ControlGroups;
  auto left() const { return inner::memory_left_by_groups(list(), mounted()); }
};

template <class Error>
bool is_out_of_memory(const Error& error) {
  return inner::is_out_of_memory(std::make_exception_ptr(error));
}

}  // namespace

TEST_CASE("bytes_after: reads a number of a list, and nothing else") {
  const std::string lines =
      "MemFree:  12 kB\nMemAvailable:    34 kB\ninactive_file 56\nbad x\nlarge 99999999999999999999\n";
  CHECK(inner::bytes_after("MemAvailable", lines) == 34 * 1024);
  CHECK(inner::bytes_after("inactive_file", lines) == 56);
  for (const auto* none : {"Mem", "bad", "large", "absent", "file"}) CHECK_FALSE(inner::bytes_after(none, lines));
  CHECK_FALSE(inner::bytes_after("x", "x -5\n"));
}

TEST_CASE("memory_left_by_groups: version 2: the least of a group and its parents") {
  const MemoryGroups groups("0::/pod/box\n");
  CHECK_FALSE(groups.left());
  groups.write("pod/box/memory.max", "max\n");
  CHECK_FALSE(groups.left());
  groups.write("pod/memory.max", "1000\n");
  groups.write("pod/memory.current", "300\n");
  CHECK(groups.left() == 700);
  groups.write("pod/memory.stat", "anon 5\ninactive_file 100\n");
  CHECK(groups.left() == 800);
  groups.write("pod/box/memory.max", "500\n");
  groups.write("pod/box/memory.current", "100\n");
  CHECK(groups.left() == 400);
}

TEST_CASE("memory_left_by_groups: version 1") {
  const MemoryGroups groups("5:memory:/box\n4:cpu:/other\n");
  groups.write("memory/box/memory.limit_in_bytes", "1000\n");
  groups.write("memory/box/memory.usage_in_bytes", "400\n");
  groups.write("memory/box/memory.stat", "total_inactive_file 50\n");
  CHECK(groups.left() == 650);
}

TEST_CASE("available_memory: a part of this machine's memory") {
  const auto available = inner::available_memory(torch::kCPU);
  if (!std::filesystem::exists("/proc/meminfo")) return;
  REQUIRE(available);
  CHECK(*available > 0);
  CHECK(*available < std::int64_t{1} << 46);
}

TEST_CASE("is_out_of_memory: errors of devices, of the CPU and of new; nothing else") {
  CHECK(is_out_of_memory(std::bad_alloc()));
  CHECK(is_out_of_memory(c10::OutOfMemoryError({"f", "f", 1}, "CUDA out of memory")));
  CHECK(is_out_of_memory(c10::Error({"f", "f", 1}, "DefaultCPUAllocator: can't allocate memory")));
  CHECK_FALSE(is_out_of_memory(c10::Error({"f", "f", 1}, "mat1 and mat2 shapes cannot be multiplied")));
  CHECK_FALSE(is_out_of_memory(std::runtime_error("DefaultCPUAllocator")));
}
