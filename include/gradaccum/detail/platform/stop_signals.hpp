// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <vector>

namespace gradaccum::detail {

/// Records these signals while it exists, and calls the program's own handlers, too. A second SIGINT ends the program.
/// Signals that were ignored before remain ignored.
class StopSignals {
 public:
  explicit StopSignals(std::vector<int> signals);
  StopSignals& operator=(StopSignals&&) = delete;
  ~StopSignals();

  /// Returns the first received signal that any object of this class handles, or 0.
  static int came();
  /// Returns the first received one of its signals, or 0. The destructor raises a received signal again unless this
  /// function has returned it.
  int received();

 private:
  std::vector<int> signals_;
  bool asked_ = false;  // received() has returned a signal
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/platform/stop_signals.ipp>
#endif
