// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>

namespace gradaccum::detail {

/// What a policy gives for the time of a fit: when that ends, by an exception, too, its file is flushed. Without a word
/// where it cannot be: `at_boundary` is where a fit hears of it.
template <class File>
struct [[nodiscard]] FlushAtEnd {
  const std::shared_ptr<File>& file;  // which may be made, or another, while the fit runs

  ~FlushAtEnd() {
    try {
      if (file) file->flush();
    } catch (const std::exception&) {
    }
  }
};

}  // namespace gradaccum::detail
