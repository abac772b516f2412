// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Each header has its definitions in an `.ipp` file of the same name. By default the library is header-only, and each
/// header includes that file itself. If all of a program's files define GRADACCUM_COMPILED, the definitions come from
/// one file that includes compiled.hpp, or from the CMake target gradaccum::compiled.
#ifdef GRADACCUM_COMPILED
#define GRADACCUM_INLINE
#else
#define GRADACCUM_INLINE inline
#endif

namespace gradaccum::detail {

// Makes mixed programs fail to link, since they would have all definitions twice: the symbol is thread-local in one
// kind of file and not in the other.
#ifdef GRADACCUM_COMPILED
extern const char either_all_files_define_GRADACCUM_COMPILED_or_none;
[[gnu::used]] static const char* const how_this_file_is_compiled = &either_all_files_define_GRADACCUM_COMPILED_or_none;
#else
[[gnu::used]] inline thread_local const char either_all_files_define_GRADACCUM_COMPILED_or_none = 0;
#endif

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/build/inline.ipp>
#endif
