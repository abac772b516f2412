// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/stop_signals.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <array>
#include <atomic>
#include <csignal>
#include <mutex>

#include <signal.h>

namespace gradaccum::detail {

/// What all StopSignals of the program share.
struct SignalState {
  struct Taken {
    int signal;
    struct sigaction before;
  };
  std::array<Taken, 2> taken{{{SIGINT, {}}, {SIGTERM, {}}}};
  std::atomic<int> received{0};
  std::atomic<bool> noticed{false};
  std::mutex mutex;
  int users = 0;

  static_assert(std::atomic<int>::is_always_lock_free);
};

GRADACCUM_INLINE SignalState& signal_state() {
  static constinit SignalState all;
  return all;
}

// Only what is safe in a signal handler.
GRADACCUM_INLINE void note_signal(int signal, siginfo_t* information, void* context) {
  auto& state = signal_state();
  int none = 0;
  const bool first = state.received.compare_exchange_strong(none, signal);
  if (!first && signal == SIGINT) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
  for (auto& [number, before] : state.taken) {
    if (number != signal || before.sa_handler == SIG_DFL) continue;
    if ((before.sa_flags & SA_SIGINFO) != 0)
      before.sa_sigaction(signal, information, context);
    else
      before.sa_handler(signal);
  }
}

GRADACCUM_INLINE StopSignals::StopSignals() {
  auto& state = signal_state();
  const std::lock_guard lock(state.mutex);
  if (state.users++ > 0) return;
  state.received = 0;
  state.noticed = false;
  for (auto& [signal, before] : state.taken) {
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) continue;
    struct sigaction ours {};
    ours.sa_sigaction = note_signal;
    ours.sa_flags = SA_RESTART | SA_SIGINFO;
    ::sigaction(signal, &ours, nullptr);
  }
}

GRADACCUM_INLINE StopSignals::~StopSignals() {
  auto& state = signal_state();
  const std::lock_guard lock(state.mutex);
  if (--state.users > 0) return;
  for (auto& [signal, before] : state.taken) {
    ::sigaction(signal, &before, nullptr);
    const bool missed = state.received == signal && !state.noticed;
    if (missed && before.sa_handler == SIG_DFL) ::raise(signal);  // the user's own has been called
  }
}

GRADACCUM_INLINE int StopSignals::received() {
  auto& state = signal_state();
  const int signal = state.received;
  if (signal != 0) state.noticed = true;
  return signal;
}

}  // namespace gradaccum::detail
