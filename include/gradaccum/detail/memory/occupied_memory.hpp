// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace gradaccum::detail {

/// Returns the bytes in use: on a GPU by all processes, from its driver; on the CPU by this one, from Linux. Empty if
/// unknown.
std::optional<std::int64_t> occupied_memory(c10::Device device);

/// Limits queries to two a second: true if the `last` was long enough ago, or never. A query takes longer than writing
/// all other numbers of an update.
bool is_time_to_ask(std::optional<std::chrono::steady_clock::time_point> last);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/occupied_memory.ipp>
#endif
