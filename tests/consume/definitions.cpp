// SPDX-License-Identifier: Apache-2.0
//
// The only file that a program without CMake must add, if its other files are compiled with GRADACCUM_COMPILED.
#include <gradaccum/compiled.hpp>
