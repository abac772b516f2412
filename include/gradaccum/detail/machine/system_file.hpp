// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <string>

namespace gradaccum::detail {

/// What a file of /proc or /sys says, its first 64 KiB: such files tell no size. Empty where it cannot be read.
std::string text_of_system_file(const std::filesystem::path& path);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/system_file.ipp>
#endif
