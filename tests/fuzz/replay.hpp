// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

/// The function that libFuzzer calls: LLVMFuzzerTestOneInput.
using TryOut = int (*)(const std::uint8_t* data, std::size_t size);

/// Returns the function of tests/fuzz/<name>.cpp; null if there is none.
TryOut find_target(std::string_view name);
