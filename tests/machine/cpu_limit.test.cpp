// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"
#include "support/control_groups.hpp"

#include <gradaccum/detail/machine/control_groups.hpp>
#include <gradaccum/detail/machine/cpu_limit.hpp>
#include <gradaccum/detail/machine/system_file.hpp>

#include <filesystem>

namespace inner = gradaccum::detail;

namespace {

using Paths = std::vector<std::filesystem::path>;

struct Groups : testing::ControlGroups {
  using ControlGroups::ControlGroups;
  std::optional<double> limit() const { return inner::cpu_limit(list(), mounted()); }
};

}  // namespace

TEST_CASE("granted_cpus: quota by period") {
  CHECK(inner::granted_cpus("200000", "100000") == 2.0);
  CHECK(inner::granted_cpus("150000", "100000") == 1.5);
  CHECK(inner::granted_cpus("1", "1000000") == 1e-6);
  CHECK(inner::granted_cpus("9223372036854775807", "1") > 1e18);
}

TEST_CASE("granted_cpus: no limit, and what is no number") {
  for (const std::string none : {"max", "-1", "0", "", " ", "2e5", "200000 ", "+5", "0x10", "9223372036854775808",
                                 "-9223372036854775809", "nan", "\xff\xff"}) {
    INFO("'" << none << "'");
    CHECK_FALSE(inner::granted_cpus(none, "100000"));
    CHECK_FALSE(inner::granted_cpus("100000", none));
  }
  CHECK_FALSE(inner::granted_cpus(std::string("1\0", 2), "1"));
}

TEST_CASE("control_groups: a group, and all above it") {
  CHECK(inner::control_groups("0::/\n", "cpu") == Paths{""});
  CHECK(inner::control_groups("0::/user.slice/a b/c\n", "cpu") ==
        Paths{"user.slice/a b/c", "user.slice/a b", "user.slice", ""});
  CHECK(inner::control_groups("9:name=systemd:/x\n4:memory:/y\n3:cpuset:/z\n2:cpuacct,cpu:/w\n", "cpu") ==
        Paths{"cpu/w", "cpu"});
  CHECK(inner::control_groups("0::/a:b\n", "cpu") == Paths{"a:b", ""});  // a name may have colons
}

TEST_CASE("control_groups: of one that cannot be seen, what can") {
  for (const std::string path : {"/../other", "/a/../../b", "..", "/a/..", ""})
    CHECK(inner::control_groups("0::" + path + "\n", "cpu") == Paths{""});
}

TEST_CASE("control_groups: what is no list") {
  for (const auto& text : {std::string(), std::string("\n"), std::string("0"), std::string("0:"), std::string("::::"),
                           std::string(100, ':'), std::string("\0\0", 2), std::string(1000, 'x')})
    for (auto& folder : inner::control_groups(text, "cpu")) CHECK(folder.is_relative());
}

TEST_CASE("cpu_limit: of version 2, the least on the way up") {
  const Groups groups("0::/pod/box\n");
  CHECK_FALSE(groups.limit());
  groups.write("pod/box/cpu.max", "max 100000\n");
  CHECK_FALSE(groups.limit());
  groups.write("pod/cpu.max", "250000 100000\n");
  CHECK(groups.limit() == 2.5);
  groups.write("cpu.max", "400000 100000\n");
  CHECK(groups.limit() == 2.5);
  groups.write("pod/box/cpu.max", "50000 100000\n");
  CHECK(groups.limit() == 0.5);
}

TEST_CASE("cpu_limit: of version 1") {
  const Groups groups("4:memory:/m\n1:cpu,cpuacct:/box\n0::/\n");
  groups.write("cpu/box/cpu.cfs_period_us", "100000\n");
  CHECK_FALSE(groups.limit());
  groups.write("cpu/box/cpu.cfs_quota_us", "-1\n");
  CHECK_FALSE(groups.limit());
  groups.write("cpu/box/cpu.cfs_quota_us", "300000\n");
  CHECK(groups.limit() == 3.0);
}

TEST_CASE("cpu_limit: a container sees its own group as the uppermost") {
  const Groups groups("1:cpu:/docker/0123\n");
  groups.write("cpu/cpu.cfs_quota_us", "120000\n");
  groups.write("cpu/cpu.cfs_period_us", "100000\n");
  CHECK(groups.limit() == 1.2);
}

TEST_CASE("cpu_limit: files that say nothing") {
  const Groups groups("0::/\n");
  for (const auto& text : {std::string(), std::string("100000"), std::string("a b"), std::string("1 0"),
                           std::string(1 << 17, '1'), std::string(1 << 17, ' ')}) {
    groups.write("cpu.max", text);
    CHECK_FALSE(groups.limit());
  }
  CHECK_FALSE(inner::cpu_limit(groups.mounted() / "nothing", groups.mounted()));
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
