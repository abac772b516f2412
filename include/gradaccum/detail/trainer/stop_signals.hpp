// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum::detail {

/// While there is one of these, SIGINT and SIGTERM are only noted, and a handler of the user's own is called as well. A
/// second SIGINT ends the program as ever: for people who cannot wait. A signal that was ignored stays ignored.
class StopSignals {
 public:
  StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  ~StopSignals();

  /// The first that came; 0 if none did. One that nobody asks for comes again at the end.
  static int received();
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/policies.ipp>
#endif
