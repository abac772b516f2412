// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

/// Definitions stand in impl/, which headers include at their ends, so the library is header-only. A program whose
/// files are all compiled with GRADACCUM_COMPILED gets the definitions from one file, which includes compiled.hpp, or
/// from the CMake target gradaccum::compiled.
namespace gradaccum::detail {

// A program that mixes files with and without GRADACCUM_COMPILED would have two copies of all definitions. It does not
// link, because this variable is thread-local in only one kind of file.
#ifdef GRADACCUM_COMPILED
extern const char either_all_files_define_GRADACCUM_COMPILED_or_none;
[[gnu::used]] static const char* const how_this_file_is_compiled = &either_all_files_define_GRADACCUM_COMPILED_or_none;
#else
[[gnu::used]] inline thread_local const char either_all_files_define_GRADACCUM_COMPILED_or_none = 0;
#endif

/// The magnitude of a number as an integer of the same order: infinity is above all numbers, NaN above infinity.
///
/// With -ffast-math a compiler may assume that std::isnan(x) is false and `x == x` true, but not so for these bits.
inline std::uint64_t bits_of_magnitude(const double& x) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  __asm__("" : "+r"(bits));
  return bits & 0x7fffffffffffffff;
}
inline bool is_finite(const double& x) { return bits_of_magnitude(x) < 0x7ff0000000000000; }
inline bool is_nan(const double& x) { return bits_of_magnitude(x) > 0x7ff0000000000000; }

}  // namespace gradaccum::detail
