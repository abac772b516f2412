// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gradaccum {

/// How a run ended, on its page.
enum class RunEnd {
  finished,     ///< it did all that it was asked for
  stopped,      ///< early, since somebody wanted that: it would not have become better
  interrupted,  ///< by a signal or an exception; it can go on
};

}  // namespace gradaccum
