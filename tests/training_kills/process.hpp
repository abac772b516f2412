// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/// Starts, watches and kills programs.
namespace training_kills {

/// A running program and its output. The destructor kills it if it still runs.
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
      for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);  // ignored in a shell's background jobs
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

  /// Reads until the program has printed this line; returns false if it ends without it.
  bool wait_for(std::string_view line) {
    while (output_.find(line) == output_.npos)
      if (!read()) return false;
    return true;
  }
  /// Sends a signal. Does nothing if the program has ended.
  void kill(int signal) const { ::kill(id_, signal); }

  /// How a program ended: the status, as in a shell 128 + signal if one killed it; and whether one did.
  struct End {
    int status = 0;
    bool killed = false;
    std::string output = {};

    /// Returns the rest of the line that begins with this name; of several ranks, one after another.
    std::string value(const std::string& name) const {
      std::string values;
      std::istringstream lines(output);
      for (std::string line; std::getline(lines, line);)
        if (line.starts_with(name + " ")) values += (values.empty() ? "" : " ") + line.substr(name.size() + 1);
      return values;
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

/// A program once for each rank, as a launcher starts it; with one rank, the program alone.
class Ranks {
 public:
  Ranks(std::vector<std::string> arguments, int count) {
    if (count == 1) {
      ranks_.emplace_back(std::move(arguments));
      return;
    }
    const auto port = std::to_string(free_port());
    for (int rank = 0; rank < count; ++rank) {
      std::vector<std::string> all{"/usr/bin/env", "RANK=" + std::to_string(rank),
                                   "WORLD_SIZE=" + std::to_string(count), "MASTER_ADDR=127.0.0.1",
                                   "MASTER_PORT=" + port};
      all.insert(all.end(), arguments.begin(), arguments.end());
      ranks_.emplace_back(std::move(all));
    }
  }

  bool wait_for(std::string_view line) {
    bool all = true;
    for (auto& rank : ranks_) all = rank.wait_for(line) && all;
    return all;
  }
  void kill(int signal, std::size_t rank = 0) const {
    std::next(ranks_.begin(), static_cast<long>(rank))->kill(signal);
  }

  /// Returns the status of a killed rank, or else the first that is not 0.
  Process::End end() {
    Process::End all;
    for (auto& rank : ranks_) {
      const auto end = rank.end();
      if (!all.killed && (end.killed || all.status == 0)) all.status = end.status;
      all.killed = all.killed || end.killed;
      all.output += end.output;
    }
    return all;
  }

 private:
  static int free_port() {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    const bool bound = ::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                       ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    ::close(socket);
    if (!bound) throw std::runtime_error("no port");
    return ntohs(address.sin_port);
  }

  std::list<Process> ranks_;
};

}  // namespace training_kills
