// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/platform/stop_signals.hpp>
#include <gradaccum/policies/save_state.hpp>

#include <array>
#include <csignal>
#include <functional>

#include <sys/wait.h>
#include <unistd.h>

using gradaccum::detail::StopSignals;

namespace {

/// Sets a signal handler, and restores the one before.
class Handler {
 public:
  Handler(int signal, void (*handler)(int)) : signal_(signal) {
    struct sigaction ours {};
    ours.sa_handler = handler;
    ::sigaction(signal, &ours, &before_);
  }
  Handler(int signal, void (*handler)(int, siginfo_t*, void*)) : signal_(signal) {
    struct sigaction ours {};
    ours.sa_sigaction = handler;
    ours.sa_flags = SA_SIGINFO;
    ::sigaction(signal, &ours, &before_);
  }
  Handler(const Handler&) = delete;
  Handler& operator=(const Handler&) = delete;
  ~Handler() { ::sigaction(signal_, &before_, nullptr); }

 private:
  int signal_;
  struct sigaction before_ {};
};

struct sigaction action_of(int signal) {
  struct sigaction now {};
  ::sigaction(signal, nullptr, &now);
  return now;
}

volatile std::sig_atomic_t plain_calls = 0, detailed_calls = 0;
volatile pid_t sender = 0;
void plain(int) { plain_calls = plain_calls + 1; }
void detailed(int, siginfo_t* information, void*) {
  detailed_calls = detailed_calls + 1;
  sender = information->si_pid;
}

/// Runs a function in a new process. Returns its status, or 128 + signal if one killed it.
int status_of(const std::function<void()>& run) {
  const auto child = ::fork();
  if (child == 0) {
    run();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("StopSignals: signals are recorded, and earlier handlers are restored") {
  const Handler interrupt(SIGINT, SIG_DFL), terminate(SIGTERM, SIG_DFL);  // instead of Catch2's
  for (const int signal : {SIGINT, SIGTERM}) {
    {
      StopSignals signals({SIGINT, SIGTERM});
      CHECK(signals.received() == 0);
      std::raise(signal);
      CHECK(signals.received() == signal);
      {
        StopSignals inner({SIGINT, SIGTERM});  // records only the first signal
        CHECK(inner.received() == signal);
      }
      CHECK(action_of(signal).sa_handler != SIG_DFL);
      if (signal == SIGINT) std::raise(SIGTERM);  // SIGINT as the second signal would end the program
      CHECK(signals.received() == signal);        // the first
    }
    CHECK(action_of(signal).sa_handler == SIG_DFL);
    StopSignals next({SIGINT, SIGTERM});
    CHECK(next.received() == 0);
  }
}

TEST_CASE("StopSignals: a user's handler is also called, once per signal") {
  plain_calls = 0;
  detailed_calls = 0;
  const Handler own_plain(SIGINT, plain), own_detailed(SIGTERM, detailed);
  {
    StopSignals signals({SIGINT, SIGTERM});
    std::raise(SIGTERM);
    CHECK(detailed_calls == 1);
    CHECK(sender == ::getpid());
    std::raise(SIGTERM);
    CHECK(detailed_calls == 2);
    CHECK(plain_calls == 0);
  }  // received() was not called
  CHECK(detailed_calls == 2);
  {
    StopSignals signals({SIGINT, SIGTERM});
    std::raise(SIGINT);
    CHECK(plain_calls == 1);
    CHECK(signals.received() == SIGINT);
  }
  CHECK(plain_calls == 1);
  CHECK(action_of(SIGINT).sa_handler == plain);
  CHECK(action_of(SIGTERM).sa_sigaction == detailed);
}

TEST_CASE("StopSignals: an ignored signal stays ignored") {
  const Handler ignored(SIGINT, SIG_IGN), terminate(SIGTERM, SIG_DFL);
  StopSignals signals({SIGINT, SIGTERM});
  std::raise(SIGINT);
  CHECK(signals.received() == 0);
  std::raise(SIGTERM);
  CHECK(signals.received() == SIGTERM);
}

TEST_CASE("StopSignals: a signal that is never read ends the program, and so does a second SIGINT") {
  const auto child = [](const std::function<void()>& run) {
    return status_of([&] {
      std::signal(SIGINT, SIG_DFL);
      std::signal(SIGTERM, SIG_DFL);
      run();
    });
  };
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto noted = [&](bool asked) {
      StopSignals signals({SIGINT, SIGTERM});
      std::raise(signal);
      if (asked) signals.received();
    };
    CHECK(child([&] { noted(false); }) == 128 + signal);
    CHECK(child([&] { noted(true); }) == 0);
  }
  const auto twice = [](int first, int second) {
    StopSignals signals({SIGINT, SIGTERM});
    std::raise(first);
    signals.received();
    std::raise(second);
  };
  CHECK(child([&] { twice(SIGINT, SIGINT); }) == 128 + SIGINT);
  CHECK(child([&] { twice(SIGTERM, SIGTERM); }) == 0);  // some schedulers send it twice
}
