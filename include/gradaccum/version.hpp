// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only macros that gradaccum leaves behind; the build reads its version from here.
#define GRADACCUM_VERSION_MAJOR 0
#define GRADACCUM_VERSION_MINOR 1
#define GRADACCUM_VERSION_PATCH 0
