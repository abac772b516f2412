// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>

#include "support/files.hpp"

namespace testing {

/// A tree of control groups, and the file that lists a process's groups.
class ControlGroups {
 public:
  explicit ControlGroups(const std::string& of_process) { write_text(list(), of_process); }

  void write(const std::string& file, const std::string& text) const {
    const auto path = mounted() / file;
    std::filesystem::create_directories(path.parent_path());
    write_text(path, text);
  }
  std::filesystem::path list() const { return directory_ / "cgroup"; }
  std::filesystem::path mounted() const { return directory_ / "mounted"; }

 private:
  Directory directory_;
};

}  // namespace testing
