// SPDX-License-Identifier: Apache-2.0
//
// Compiled into one program twice, with GRADACCUM_COMPILED and without.
#include <gradaccum/gradients.hpp>

#ifdef GRADACCUM_COMPILED
int main() {}
#endif
