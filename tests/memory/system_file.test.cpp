// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"
#include "support/files.hpp"

#include <gradaccum/detail/memory/memory_ledger.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace inner = gradaccum::detail;

namespace {

using Paths = std::vector<std::filesystem::path>;

}  // namespace

TEST_CASE("control_groups: a group and its parents") {
  CHECK(inner::control_groups("0::/\n", "cpu") == Paths{""});
  CHECK(inner::control_groups("0::/user.slice/a b/c\n", "cpu") ==
        Paths{"user.slice/a b/c", "user.slice/a b", "user.slice", ""});
  CHECK(inner::control_groups("9:name=systemd:/x\n4:memory:/y\n3:cpuset:/z\n2:cpuacct,cpu:/w\n", "cpu") ==
        Paths{"cpu/w", "cpu"});
  CHECK(inner::control_groups("0::/a:b\n", "cpu") == Paths{"a:b", ""});  // a name may have colons
}

TEST_CASE("control_groups: the visible part of a hidden group") {
  for (const std::string path : {"/../other", "/a/../../b", "..", "/a/..", ""})
    CHECK(inner::control_groups("0::" + path + "\n", "cpu") == Paths{""});
}

TEST_CASE("control_groups: invalid lists") {
  for (const auto& text : {std::string(), std::string("\n"), std::string("0"), std::string("0:"), std::string("::::"),
                           std::string(100, ':'), std::string("\0\0", 2), std::string(1000, 'x')})
    for (auto& folder : inner::control_groups(text, "cpu")) CHECK(folder.is_relative());
}

TEST_CASE("text_of_system_file: the beginning, or nothing") {
  const testing::Directory directory;
  testing::write_text(directory / "file", "two\nlines\n");
  CHECK(inner::text_of_system_file(directory / "file") == "two\nlines\n");
  testing::write_text(directory / "file", std::string(1 << 20, 'x'));
  CHECK(inner::text_of_system_file(directory / "file") == std::string(1 << 16, 'x'));
  CHECK(inner::text_of_system_file(directory / "nothing").empty());
  CHECK(inner::text_of_system_file(directory / "").empty());
}
