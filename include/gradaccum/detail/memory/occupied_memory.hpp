// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace gradaccum::detail {

/// Bytes in use now: on a GPU by all processes, as its driver tells; on the CPU by this one, as Linux tells. None where
/// nobody does.
std::optional<std::int64_t> occupied_memory(c10::Device device);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/memory/occupied_memory.ipp>
#endif
