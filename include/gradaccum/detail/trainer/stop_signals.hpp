// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <csignal>
#include <mutex>

#include <signal.h>

namespace gradaccum::detail {

/// While there is one of these, SIGINT and SIGTERM are only noted, and a handler of the user's own is called as well. A
/// second SIGINT ends the program as ever: for people who cannot wait. A signal that was ignored stays ignored.
class StopSignals {
 public:
  StopSignals() {
    const std::lock_guard lock(mutex());
    if (users()++ > 0) return;
    received_number() = 0;
    noticed() = false;
    for (auto& [signal, before] : taken()) take(signal, before);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  ~StopSignals() {
    const std::lock_guard lock(mutex());
    if (--users() > 0) return;
    for (auto& [signal, before] : taken()) {
      ::sigaction(signal, &before, nullptr);
      const bool missed = received_number() == signal && !noticed();
      if (missed && before.sa_handler == SIG_DFL) ::raise(signal);  // the user's own has been called
    }
  }

  /// The first that came; 0 if none did. One that nobody asks for comes again at the end.
  static int received() {
    const int signal = received_number();
    if (signal != 0) noticed() = true;
    return signal;
  }

 private:
  struct Taken {
    int signal;
    struct sigaction before;
  };

  static void take(int signal, struct sigaction& before) {
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) return;
    struct sigaction ours {};
    ours.sa_sigaction = note;
    ours.sa_flags = SA_RESTART | SA_SIGINFO;
    ::sigaction(signal, &ours, nullptr);
  }

  // Only what is safe in a signal handler.
  static void note(int signal, siginfo_t* information, void* context) {
    int none = 0;
    const bool first = received_number().compare_exchange_strong(none, signal);
    if (!first && signal == SIGINT) {
      ::signal(signal, SIG_DFL);
      ::raise(signal);
    }
    for (auto& [number, before] : taken()) {
      if (number != signal || before.sa_handler == SIG_DFL) continue;
      if ((before.sa_flags & SA_SIGINFO) != 0)
        before.sa_sigaction(signal, information, context);
      else
        before.sa_handler(signal);
    }
  }

  static std::array<Taken, 2>& taken() {
    static std::array<Taken, 2> all{{{SIGINT, {}}, {SIGTERM, {}}}};
    return all;
  }
  static std::atomic<int>& received_number() {
    static std::atomic<int> number{0};
    static_assert(std::atomic<int>::is_always_lock_free);
    return number;
  }
  static std::atomic<bool>& noticed() {
    static std::atomic<bool> by_somebody{false};
    return by_somebody;
  }
  static std::mutex& mutex() {
    static std::mutex all;
    return all;
  }
  static int& users() {
    static int count = 0;
    return count;
  }
};

}  // namespace gradaccum::detail
