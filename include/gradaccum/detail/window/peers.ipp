// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/peers.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <exception>
#include <stdexcept>

namespace gradaccum::detail {

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
  const auto first = peers->first_error(text);
  if (own) std::rethrow_exception(own);
  if (!first.empty()) throw std::runtime_error(first);
}

}  // namespace gradaccum::detail
