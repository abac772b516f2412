// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace bloom {

/// Calls `work(i)` for each i below `count` on `threads` threads, including the caller's. If a call throws, no further
/// calls begin, and the exception is rethrown here.
template <class Work>
void parallel_for(std::size_t count, int threads, const Work& work) {
  if (threads < 1)
    throw std::invalid_argument("parallel_for: threads must be at least 1, got " + std::to_string(threads));
  std::atomic<std::size_t> next = 0;
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work_on = [&] {
    try {
      for (auto i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;  // joined at the end of the block, even if starting one fails
    for (std::size_t i = 1; i < std::min(static_cast<std::size_t>(threads), count); ++i) others.emplace_back(work_on);
    work_on();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace bloom
