// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/optim/adamw.hpp>  // also declares Adam
