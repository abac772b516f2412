// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Definitions stand in impl/, which headers include at their ends, so the library is header-only. A program whose files
/// are all compiled with GRADACCUM_COMPILED gets the definitions from one file, which includes compiled.hpp, or from the
/// CMake target gradaccum::compiled.
namespace gradaccum::detail {

// A program of which some files are compiled so and some are not would have all definitions twice. It does not link:
// this is a thread's own in the one kind of file, and not in the other.
#ifdef GRADACCUM_COMPILED
extern const char either_all_files_define_GRADACCUM_COMPILED_or_none;
[[gnu::used]] static const char* const how_this_file_is_compiled = &either_all_files_define_GRADACCUM_COMPILED_or_none;
#else
[[gnu::used]] inline thread_local const char either_all_files_define_GRADACCUM_COMPILED_or_none = 0;
#endif

}  // namespace gradaccum::detail
