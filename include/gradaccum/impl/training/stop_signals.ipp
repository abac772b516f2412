// SPDX-License-Identifier: Apache-2.0
// Records signals while a fit runs.
#pragma once

#include <gradaccum/detail/training/stop_signals.hpp>

#include <c10/util/FunctionRef.h>

#include <signal.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// State shared by all StopSignals of the program.
struct SignalState {
  struct Signal {
    struct sigaction before = {};
    int users = 0;
    std::atomic<int> place{0};  // order of arrival, from 1; 0: not received
  };
  std::array<Signal, NSIG> signals = {};
  std::atomic<int> came{0};
  std::mutex mutex;
  int users = 0;

  static_assert(std::atomic<int>::is_always_lock_free);
};

GRADACCUM_INLINE constinit SignalState signal_state;

// Does only async-signal-safe work.
GRADACCUM_INLINE void note_signal(int signal, siginfo_t* information, void* context) {
  auto& [before, users, place] = signal_state.signals[static_cast<std::size_t>(signal)];
  const int now = ++signal_state.came;
  int none = 0;
  place.compare_exchange_strong(none, now);
  if (now > 1 && signal == SIGINT) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
  if (before.sa_handler == SIG_DFL) return;
  if ((before.sa_flags & SA_SIGINFO) != 0)
    before.sa_sigaction(signal, information, context);
  else
    before.sa_handler(signal);
}

GRADACCUM_INLINE StopSignals::StopSignals(std::vector<int> signals) : signals_(std::move(signals)) {
  const std::lock_guard lock(signal_state.mutex);
  if (signal_state.users++ == 0) signal_state.came = 0;
  for (const int signal : signals_) {
    auto& [before, users, place] = signal_state.signals.at(static_cast<std::size_t>(signal));
    if (users++ > 0) continue;
    place = 0;
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_IGN) continue;
    struct sigaction ours {};
    ours.sa_sigaction = note_signal;
    ours.sa_flags = SA_RESTART | SA_SIGINFO;
    ::sigaction(signal, &ours, nullptr);
  }
}

GRADACCUM_INLINE StopSignals::~StopSignals() {
  const std::lock_guard lock(signal_state.mutex);
  --signal_state.users;
  for (const int signal : signals_) {
    auto& [before, users, place] = signal_state.signals[static_cast<std::size_t>(signal)];
    if (--users > 0) continue;
    ::sigaction(signal, &before, nullptr);
    if (place > 0 && !asked_ && before.sa_handler == SIG_DFL) ::raise(signal);  // a user's handler was called already
  }
}

/// Returns the first signal received for which `counts` is true, or 0.
GRADACCUM_INLINE int first_signal(c10::function_ref<bool(int signal)> counts) {
  int first = 0, place_of_first = 0;
  for (int signal = 1; signal < NSIG; ++signal) {
    const int at = signal_state.signals[static_cast<std::size_t>(signal)].place;
    if (at > 0 && counts(signal) && (first == 0 || at < place_of_first)) first = signal, place_of_first = at;
  }
  return first;
}

GRADACCUM_INLINE int StopSignals::came() {
  const std::lock_guard lock(signal_state.mutex);
  return first_signal([](int signal) { return signal_state.signals[static_cast<std::size_t>(signal)].users > 0; });
}

GRADACCUM_INLINE int StopSignals::received() {
  const int first = first_signal([this](int signal) { return std::ranges::find(signals_, signal) != signals_.end(); });
  asked_ = asked_ || first != 0;
  return first;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
