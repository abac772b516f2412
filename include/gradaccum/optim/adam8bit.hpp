// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/optim/adamw8bit.hpp>  // also declares Adam8bit
