// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <string>

namespace gradaccum::detail {

/// Notes, while it is alive, whether an operation of this thread draws from one of LibTorch's default generators, which
/// all threads have in common.
class [[nodiscard]] DrawWatch {
 public:
  DrawWatch();
  DrawWatch(const DrawWatch&) = delete;
  DrawWatch& operator=(const DrawWatch&) = delete;
  ~DrawWatch();

  /// The first operation that did; empty if none has.
  const std::string& drawn() const;

 private:
  std::uint64_t handle_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/draw_watch.ipp>
#endif
