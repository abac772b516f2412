// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/peers.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/StringUtil.h>

#include <cstddef>
#include <exception>
#include <stdexcept>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string said_by_first(const Peers& peers, const std::string& on_rank_0) {
  return peers.texts_of_all(peers.rank() == 0 ? on_rank_0 : "")[0];
}

/// Finds the first rank's error and puts the rank's number before it; empty if there is none.
GRADACCUM_INLINE std::string first_error(const Peers& peers, const std::string& own) {
  const auto all = peers.texts_of_all(own);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) return c10::str("rank ", rank, ": ", all[rank].substr(0, all[rank].find('\n')));
  return "";
}

GRADACCUM_INLINE void run_on_all(const Peers* peers, c10::function_ref<void()> work) {
  if (!peers) return work();
  std::exception_ptr own;
  std::string text;
  try {
    work();
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = error.what();
  }
  std::string first;
  try {
    first = first_error(*peers, text);
  } catch (const std::exception&) {
    if (!own) throw;  // else this rank's error, for example of a lost rank, explains why the others cannot be reached
  }
  if (own) std::rethrow_exception(own);
  if (!first.empty()) throw std::runtime_error(first);
}

}  // namespace gradaccum::detail
