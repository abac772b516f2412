// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string_view>

namespace gradaccum::detail {

/// A file that is rewritten now and then. Who reads it sees one text or the next, never half of one; after a power
/// failure it may be gone: nobody waits for the disk.
class PageFile {
 public:
  using Clock = std::chrono::steady_clock;

  PageFile(std::filesystem::path path, std::chrono::duration<double> every);

  /// Throws where that cannot be, before there is something to lose; changes nothing.
  void check() const;
  bool is_due() const;
  /// Throws `std::runtime_error`; then it is due again after the same time, and there is what there was before.
  void write(std::string_view text);

 private:
  std::filesystem::path path_, part_;
  std::chrono::duration<double> every_;
  std::optional<Clock::time_point> last_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/page_file.ipp>
#endif
