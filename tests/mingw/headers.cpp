// SPDX-License-Identifier: Apache-2.0
// All public headers, and all definitions, but those of several processes.
#include <gradaccum/gradaccum.hpp>
#include <gradaccum/mkl_on_amd.hpp>

#ifdef WITH_PROCESSES
#include <gradaccum/process_group.hpp>
#endif
