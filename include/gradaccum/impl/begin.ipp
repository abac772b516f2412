// SPDX-License-Identifier: Apache-2.0
// Each file of definitions includes this last, and undefines GRADACCUM_INLINE at its end, so that programs do not see
// the macro. A header that declares virtual functions defined in such a file does the same: unless the first of them is
// declared inline, each program that includes it would contain the table of virtual functions and all functions that
// they call.
#include <gradaccum/detail/build/inline.hpp>

#ifdef GRADACCUM_COMPILED
#define GRADACCUM_INLINE
#else
#define GRADACCUM_INLINE inline
#endif
