// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
extern const char either_all_files_define_GRADACCUM_COMPILED_or_none = 0;
}
#endif
