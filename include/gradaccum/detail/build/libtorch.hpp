// SPDX-License-Identifier: Apache-2.0
#pragma once

// The version of LibTorch; older ones lack some functions.
#include <torch/version.h>

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 8)
#error "gradaccum needs LibTorch 2.8.0 or newer"
#endif
