// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum::detail {

/// Only notes SIGINT and SIGTERM while it exists, and also calls a handler of the user's own. A second SIGINT ends the
/// program as ever, for people who cannot wait. A signal that was ignored stays ignored.
class StopSignals {
 public:
  StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  ~StopSignals();

  /// Returns the first signal, or 0. A signal that nobody asks for is raised again at the end.
  static int received();
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/policies.ipp>
#endif
