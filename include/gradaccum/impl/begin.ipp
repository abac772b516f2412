// SPDX-License-Identifier: Apache-2.0
//
// Every file of definitions includes this last, and takes GRADACCUM_INLINE back at its end: no program sees the macro.
#include <gradaccum/detail/build/inline.hpp>

#ifdef GRADACCUM_COMPILED
#define GRADACCUM_INLINE
#else
#define GRADACCUM_INLINE inline
#endif
