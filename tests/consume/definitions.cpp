// SPDX-License-Identifier: Apache-2.0
//
// All that a program without CMake needs, if its other files are compiled with GRADACCUM_COMPILED as well.
#include <gradaccum/compiled.hpp>
