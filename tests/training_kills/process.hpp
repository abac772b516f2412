// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

/// Programs that are started, watched and killed.
namespace training_kills {

/// A program that runs, and what it prints. Killed at the end of its scope, if it runs then.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    id_ = ::fork();
    if (id_ == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::close(ends[0]);
      ::close(ends[1]);
      for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);  // a shell's background ignores some
      ::execv(pointers[0], pointers.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    from_ = ends[0];
    if (id_ < 0) throw std::runtime_error("no process");
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (!waited_) {
      kill(SIGKILL);
      ::waitpid(id_, nullptr, 0);
    }
    ::close(from_);
  }

  /// Reads until it has printed this line; false if it ends without.
  bool wait_for(std::string_view line) {
    while (output_.find(line) == output_.npos)
      if (!read()) return false;
    return true;
  }
  /// It may have ended just before: then nothing happens.
  void kill(int signal) const { ::kill(id_, signal); }

  /// Its end: as a shell tells it, 128 + signal where one killed it; and whether one did.
  struct End {
    int status = 0;
    bool killed = false;
    std::string output = {};

    /// The rest of the line that begins so.
    std::string value(const std::string& name) const {
      const auto begin = ("\n" + output).find("\n" + name + " ");
      if (begin == output.npos) return "";
      return output.substr(begin + name.size() + 1, output.find('\n', begin) - begin - name.size() - 1);
    }
  };
  End end() {
    while (read()) {
    }
    int status = 0;
    if (::waitpid(id_, &status, 0) != id_) throw std::runtime_error("no end of a process");
    waited_ = true;
    if (WIFEXITED(status)) return {WEXITSTATUS(status), false, output_};
    return {128 + WTERMSIG(status), true, output_};
  }

 private:
  bool read() {
    char text[512];
    const auto bytes = ::read(from_, text, sizeof text);
    if (bytes > 0) output_.append(text, static_cast<std::size_t>(bytes));
    return bytes > 0;
  }

  pid_t id_ = -1;
  int from_ = -1;
  bool waited_ = false;
  std::string output_;
};

}  // namespace training_kills
