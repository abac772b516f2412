// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/process_group.hpp>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstddef>
#include <exception>
#include <string_view>
#include <thread>
#include <vector>

namespace tests {

/// Returns whether a rank failed only because another did.
inline bool is_of_another_rank(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return std::string_view(known.what()).find("has given up") != std::string_view::npos;
  } catch (...) {
    return false;
  }
}

/// Runs `body(group)` once for each rank, in threads of this process that communicate over loopback as processes would.
/// Rethrows the first exception when all have ended, preferring one that is not a consequence of another rank's.
template <class Body>
void as_ranks(int world_size, const Body& body, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        gradaccum::ProcessGroup group(store, rank, world_size, {.timeout = timeout});
        body(group);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  for (auto& thread : threads) thread.join();
  for (const bool of_another : {false, true})
    for (auto& error : errors)
      if (error && is_of_another_rank(error) == of_another) std::rethrow_exception(error);
}

}  // namespace tests
