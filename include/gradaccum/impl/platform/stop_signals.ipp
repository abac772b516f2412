// SPDX-License-Identifier: Apache-2.0
// Records signals while a fit runs.
#pragma once

#include <gradaccum/detail/platform/stop_signals.hpp>

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <mutex>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// The arguments that POSIX passes to a handler in addition to the signal.
struct SignalContext {
  void* information = nullptr;
  void* machine = nullptr;
};

/// The handler that a signal had before, to be called and restored.
class EarlierHandler {
 public:
  /// Replaces the handler, unless the signal is ignored.
  void replace(int signal);
  void restore(int signal);
  bool is_default() const;
  void call(int signal, const SignalContext& context) const;

 private:
#ifdef _WIN32
  void (*before_)(int) = nullptr;
#else
  struct sigaction before_ = {};
#endif
};

/// State shared by all StopSignals of the program.
struct SignalState {
  struct Signal {
    EarlierHandler before = {};
    int users = 0;
    std::atomic<int> place{0};  // order of arrival, from 1; 0: not received
  };
  std::array<Signal, NSIG> signals = {};
  std::atomic<int> came{0};
  std::mutex mutex;
  int users = 0;

  static_assert(std::atomic<int>::is_always_lock_free);
};

GRADACCUM_INLINE SignalState signal_state;

// Does only async-signal-safe work.
GRADACCUM_INLINE void note_signal(int signal, const SignalContext& context) {
  auto& [before, users, place] = signal_state.signals[static_cast<std::size_t>(signal)];
  const int now = ++signal_state.came;
  int none = 0;
  place.compare_exchange_strong(none, now);
  if (now > 1 && signal == SIGINT) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  if (!before.is_default()) before.call(signal, context);
}

#ifdef _WIN32
GRADACCUM_INLINE void on_signal(int signal) {
  std::signal(signal, on_signal);  // Windows restores the default handler before each call
  note_signal(signal, {});
}

GRADACCUM_INLINE void EarlierHandler::replace(int signal) {
  before_ = std::signal(signal, on_signal);
  if (before_ == SIG_IGN) std::signal(signal, SIG_IGN);
}
GRADACCUM_INLINE void EarlierHandler::restore(int signal) { std::signal(signal, before_); }
GRADACCUM_INLINE bool EarlierHandler::is_default() const { return before_ == SIG_DFL; }
GRADACCUM_INLINE void EarlierHandler::call(int signal, const SignalContext& /*none*/) const { before_(signal); }
#else
GRADACCUM_INLINE void on_signal(int signal, siginfo_t* information, void* machine) {
  note_signal(signal, {information, machine});
}

GRADACCUM_INLINE void EarlierHandler::replace(int signal) {
  ::sigaction(signal, nullptr, &before_);
  if (before_.sa_handler == SIG_IGN) return;
  struct sigaction ours {};
  ours.sa_sigaction = on_signal;
  ours.sa_flags = SA_RESTART | SA_SIGINFO;
  ::sigaction(signal, &ours, nullptr);
}
GRADACCUM_INLINE void EarlierHandler::restore(int signal) { ::sigaction(signal, &before_, nullptr); }
GRADACCUM_INLINE bool EarlierHandler::is_default() const { return before_.sa_handler == SIG_DFL; }
GRADACCUM_INLINE void EarlierHandler::call(int signal, const SignalContext& context) const {
  if ((before_.sa_flags & SA_SIGINFO) != 0)
    before_.sa_sigaction(signal, static_cast<siginfo_t*>(context.information), context.machine);
  else
    before_.sa_handler(signal);
}
#endif

GRADACCUM_INLINE StopSignals::StopSignals(std::vector<int> signals) : signals_(std::move(signals)) {
  const std::lock_guard lock(signal_state.mutex);
  if (signal_state.users++ == 0) signal_state.came = 0;
  for (const int signal : signals_) {
    auto& [before, users, place] = signal_state.signals.at(static_cast<std::size_t>(signal));
    if (users++ > 0) continue;
    place = 0;
    before.replace(signal);
  }
}

GRADACCUM_INLINE StopSignals::~StopSignals() {
  const std::lock_guard lock(signal_state.mutex);
  --signal_state.users;
  for (const int signal : signals_) {
    auto& [before, users, place] = signal_state.signals[static_cast<std::size_t>(signal)];
    if (--users > 0) continue;
    before.restore(signal);
    if (place > 0 && !asked_ && before.is_default()) std::raise(signal);  // a user's handler was called already
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
