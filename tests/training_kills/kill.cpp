// SPDX-License-Identifier: Apache-2.0
//
// kill TRAIN DIRECTORY KILLS [RANKS]: kills the program train.cpp this number of times (GRADACCUM_KILLS overrides it),
// at random moments of its training, and while a state is written or removed. After each kill all finished states must
// be intact, and each training must end with the hash of an uninterrupted one. KILLS 0: stops it by SIGTERM and SIGINT
// instead, and checks that a state with other random numbers gives another hash. RANKS: kills one of several ranks
// while a state is written; the others must end, and all start again.

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/formats.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/inotify.h>

#include "process.hpp"

namespace training_kills {

namespace inner = gradaccum::detail;
using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::microseconds;

void require(bool fulfilled, const std::string& what) {
  if (!fulfilled) throw std::runtime_error(what);
}

bool is_unfinished(std::string_view name) { return name.find(".tmp-") != name.npos; }

/// Watches a directory for states that appear and disappear.
class Observer {
 public:
  explicit Observer(const std::filesystem::path& directory) {
    std::filesystem::create_directories(directory);
    if (::inotify_add_watch(queue_.number(), directory.c_str(), IN_CREATE | IN_MOVED_TO) < 0)
      throw std::runtime_error("no inotify");
  }

  /// Waits until a state begins to be written or removed; returns false after a timeout.
  bool wait_for_unfinished() const {
    alignas(inotify_event) char events[4096];
    pollfd ready{queue_.number(), POLLIN, 0};
    while (::poll(&ready, 1, 200) == 1) {
      const auto bytes = ::read(queue_.number(), events, sizeof events);
      for (ssize_t at = 0; at < bytes;) {
        const auto* const event = reinterpret_cast<const inotify_event*>(events + at);
        if (event->len > 0 && is_unfinished(event->name)) return true;
        at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
      }
    }
    return false;
  }

 private:
  struct Queue {
    int descriptor = ::inotify_init1(IN_CLOEXEC);
    Queue() = default;
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;
    ~Queue() { ::close(descriptor); }
    int number() const { return descriptor; }
  };
  Queue queue_;
};

class Trial {
 public:
  Trial(std::string program, std::filesystem::path directory, int ranks)
      : program_(std::move(program)), directory_(std::move(directory)), ranks_(ranks) {
    std::filesystem::remove_all(directory_);
  }

  void run(int kills) {
    run_straight();
    if (kills == 0) {
      stop_by_signals();
      change_random_numbers();
    } else {
      while (kills_ < kills) kill_until_done(kills);
      std::printf(
          "%d kills, %d of them while a state was written or removed; %d trainings went on %d times from a state and "
          "%d times from the beginning, and ended with the hash %s\n",
          kills_, in_states_, trainings_, resumed_, afresh_, hash_.c_str());
      const bool may_miss = ranks_ > 1 && kills < 20;
      require(may_miss || (in_states_ > 0 && resumed_ > 0), "no kill fell where it matters");
    }
    std::filesystem::remove_all(directory_);
  }

 private:
  Ranks start(const std::filesystem::path& states, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {program_, states.string()});
    return Ranks(std::move(more), ranks_);
  }
  /// Checks that finished states are intact; returns the names of unfinished ones.
  static std::set<std::string> check_states(const std::filesystem::path& states) {
    for (const auto& state : inner::StateDirectory(states).finished())
      inner::check_files(state.path, inner::read_manifest(state.path));
    std::set<std::string> unfinished;
    for (const auto& name : inner::names_in(states))
      if (is_unfinished(name)) unfinished.insert(name);
    return unfinished;
  }
  /// Checks that the training has ended and has left only states. Returns its hash.
  static std::string checked_hash(const Process::End& end, const std::filesystem::path& states) {
    require(end.status == 0, "the training must end, got status " + std::to_string(end.status));
    require(check_states(states).empty(), states.string() + ": nothing unfinished must be left");
    return end.value("hash");
  }
  void check(const Process::End& end, const std::filesystem::path& states) const {
    check_hash(checked_hash(end, states), states);
  }
  void check_hash(const std::string& hash, const std::filesystem::path& states) const {
    require(hash == hash_, states.string() + ": the hash must be " + hash_ + ", got " + hash);
  }

  void run_straight() {
    const auto states = directory_ / "straight";
    const auto begin = Clock::now();
    auto process = start(states);
    process.wait_for("training");
    const auto training = Clock::now();
    hash_ = checked_hash(process.end(), states);
    run_time_ = std::chrono::duration_cast<Microseconds>(Clock::now() - begin);
    training_time_ = std::chrono::duration_cast<Microseconds>(Clock::now() - training);
    require(hash_.size() == static_cast<std::size_t>(9 * ranks_ - 1), "each rank must give a hash, got " + hash_);
    check(start(states).end(), states);  // a finished training has nothing to do
  }

  void stop_by_signals() {
    const auto states = directory_ / "signals";
    // After micro-batches 1, 3, 16 and 26, with windows of 3 and epochs of 26; at the end of an epoch; and after 65.
    for (const auto& [signal, micro_batch, window] : {std::array{SIGTERM, 1, 1},
                                                      {SIGINT, 2, 0},
                                                      {SIGTERM, 13, 1},
                                                      {SIGINT, 10, 2},
                                                      {SIGTERM, 1, 2},
                                                      {SIGTERM, 40, 2}}) {
      const auto end = start(states, {std::to_string(signal), std::to_string(micro_batch)}).end();
      require(!end.killed && end.status == 128 + signal, "the status must be 128 + signal");
      require(end.value("window") == std::to_string(window),
              "the window must have " + std::to_string(window) + ", got " + end.value("window"));
      check_states(states);
    }
    check(start(states).end(), states);
    const auto others = directory_ / "outside";
    auto longest = training_time_ / 3;
    for (const int sent : {SIGTERM, SIGINT})
      while (!stops(others, sent, random_time(longest))) longest /= 2;
    check(start(others).end(), others);
  }
  /// Stops the program by a signal at a random moment; returns false if the signal came too late.
  bool stops(const std::filesystem::path& states, int signal, Microseconds moment) const {
    auto process = start(states);
    process.wait_for("training");
    std::this_thread::sleep_for(moment);
    process.kill(signal);
    const auto end = process.end();
    if (!end.killed && end.status == 128 + signal) return true;
    // The signal came after the fit, when it has the default action again.
    if (!end.killed || !end.value("hash").empty()) check_hash(end.value("hash"), states);
    std::filesystem::remove_all(states);
    return false;
  }

  /// Changes a state's random numbers, with correct checksums, to show that saving them matters.
  void change_random_numbers() const {
    for (const bool change : {false, true}) {
      const auto states = directory_ / (change ? "other_numbers" : "same_numbers");
      require(start(states, {std::to_string(SIGTERM), "20"}).end().status == 128 + SIGTERM, "it must stop");
      std::vector<std::string> arguments{program_, "rewrite", states.string()};
      if (change) arguments.push_back("7");
      require(Process(arguments).end().status == 0, "the state must be written once more");
      const auto hash = checked_hash(start(states).end(), states);
      require((hash != hash_) == change, "with other random numbers, and only then, the hash must be another");
    }
  }

  /// Runs one training in as many processes as the kills require; the last process is not killed.
  void kill_until_done(int kills) {
    const auto states = directory_ / std::to_string(trainings_++);
    while (!ends_in(states, kills)) {
    }
    std::filesystem::remove_all(states);
  }
  bool ends_in(const std::filesystem::path& states, int kills) {
    const Observer observer(states);
    const auto before = check_states(states);
    const bool has_state = !inner::StateDirectory(states).finished().empty();
    (has_state ? resumed_ : afresh_) += 1;
    auto process = start(states);
    if (kills_ < kills) kill_some_time(process, observer);
    const auto end = process.end();
    if (!end.killed) {
      check(end, states);
      require((end.value("from").find("the beginning") == std::string::npos) == has_state,
              "it must go on where there is a state");
      return true;
    }
    require(end.status == 128 + SIGKILL, "SIGKILL must have ended it");
    ++kills_;
    const auto after = check_states(states);  // older leftovers may still exist
    in_states_ += !std::includes(before.begin(), before.end(), after.begin(), after.end());
    return false;
  }

  void kill_some_time(Ranks& process, const Observer& observer) {
    if (ranks_ == 1 && random_() % 2 == 0) {  // ranks that have not connected would wait for each other
      std::this_thread::sleep_for(random_time(run_time_));
    } else if (process.wait_for("training")) {
      for (auto states = random_() % 3 + 1; states > 0; --states) observer.wait_for_unfinished();
      // Prefers early moments, because writing takes a hundred times as long on some disks.
      std::this_thread::sleep_for(random_time(random_time(random_time(Microseconds(20000)))));
    }
    process.kill(SIGKILL, random_() % static_cast<std::size_t>(ranks_));
  }
  Microseconds random_time(Microseconds longest) {
    return Microseconds(std::uniform_int_distribution<std::int64_t>(0, longest.count())(random_));
  }

  std::string program_, hash_;
  std::filesystem::path directory_;
  int ranks_;
  Microseconds run_time_{}, training_time_{};
  std::mt19937 random_{0};
  int kills_ = 0, in_states_ = 0, trainings_ = 0, resumed_ = 0, afresh_ = 0;
};

}  // namespace training_kills

int main(int argc, char** argv) {
  try {
    training_kills::require(argc == 4 || argc == 5, "usage: kill TRAIN DIRECTORY KILLS [RANKS]");
    const char* const kills = std::getenv("GRADACCUM_KILLS");
    const int given = std::stoi(argv[3]);
    training_kills::Trial(argv[1], argv[2], argc == 5 ? std::stoi(argv[4]) : 1)
        .run(given > 0 && kills ? std::stoi(kills) : given);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
