// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>

namespace gradaccum::detail {

/// Returns a guard that a policy holds during a fit. It flushes the file at its end, even after an exception, and
/// ignores errors, which `at_boundary` reports. The file may be made or replaced while the fit runs.
template <class File>
std::shared_ptr<void> flush_at_end(const std::shared_ptr<File>& file) {
  return {nullptr, [&file](void*) noexcept {
            try {
              if (file) file->flush();
            } catch (const std::exception&) {
            }
          }};
}

}  // namespace gradaccum::detail
