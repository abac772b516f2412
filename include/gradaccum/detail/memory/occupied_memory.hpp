// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace gradaccum::detail {

/// Bytes in use now: on a GPU by all processes, as its driver tells; on the CPU by this one, as Linux tells. None where
/// nobody does.
std::optional<std::int64_t> occupied_memory(c10::Device device);

/// Whether who asked `last` then, or never, may ask again: twice a second at most. To ask takes longer than to write
/// all other numbers of an update.
bool is_time_to_ask(std::optional<std::chrono::steady_clock::time_point> last);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/occupied_memory.ipp>
#endif
