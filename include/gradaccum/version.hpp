// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: build

// These are the only macros that the library leaves defined. The build reads its version from here.
#define GRADACCUM_VERSION_MAJOR 0
#define GRADACCUM_VERSION_MINOR 1
#define GRADACCUM_VERSION_PATCH 0
