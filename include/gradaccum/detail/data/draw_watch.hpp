// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <string>

namespace gradaccum::detail {

/// Detects, while it is alive, operations of this thread that draw from LibTorch's default generators, which all
/// threads share.
class [[nodiscard]] DrawWatch {
 public:
  DrawWatch();
  DrawWatch(const DrawWatch&) = delete;
  DrawWatch& operator=(const DrawWatch&) = delete;
  ~DrawWatch();

  /// The first operation that drew; empty if none did.
  const std::string& drawn() const;

 private:
  std::uint64_t handle_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/draw_watch.ipp>
#endif
