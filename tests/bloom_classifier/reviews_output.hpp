// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/reviews.hpp"

#include <ostream>

namespace bloom {

/// Formats a review for the messages of tests.
inline std::ostream& operator<<(std::ostream& out, const Review& review) {
  return out << review.label << ' ' << shown(review.text);
}

}  // namespace bloom
