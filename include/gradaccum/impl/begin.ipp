// SPDX-License-Identifier: Apache-2.0
//
// Each file of definitions includes this last, and takes GRADACCUM_INLINE back at its end: no program sees the macro. So
// does a header with virtual functions that are defined in such a file. A class whose first one is not inline where it is
// declared has a table of virtual functions, and with it all that they call, in each program that includes its header.
#include <gradaccum/detail/build/inline.hpp>

#ifdef GRADACCUM_COMPILED
#define GRADACCUM_INLINE
#else
#define GRADACCUM_INLINE inline
#endif
