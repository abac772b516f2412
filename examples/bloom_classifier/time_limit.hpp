// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/policy.hpp>

namespace bloom {

namespace ga = gradaccum;

/// A policy: ends the training with the first update after so many minutes, and knows when its last update was.
struct TimeLimit {
  double minutes = 0;  // 0: no limit
  const ga::FitStatus* status = nullptr;
  std::function<void()> stop = {};
  double seconds = 0;  // of the fit, up to the last update; without what is evaluated after it

  void attach(auto& trainer) {
    status = &trainer.status();
    stop = [&trainer] { trainer.stop(); };
  }
  void after_window(const ga::Step&) {
    seconds = status->seconds();
    if (minutes > 0 && seconds >= 60 * minutes) stop();
  }
};

}  // namespace bloom
