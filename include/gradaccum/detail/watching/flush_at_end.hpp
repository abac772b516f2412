// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>

namespace gradaccum::detail {

/// A scope that a policy returns for the duration of a fit. Flushes the file at its end, even after an exception.
/// Ignores errors, which `at_boundary` reports.
template <class File>
struct [[nodiscard]] FlushAtEnd {
  const std::shared_ptr<File>& file;  // may be made or replaced while the fit runs

  ~FlushAtEnd() {
    try {
      if (file) file->flush();
    } catch (const std::exception&) {
    }
  }
};

}  // namespace gradaccum::detail
