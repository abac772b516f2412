// SPDX-License-Identifier: Apache-2.0
#pragma once

// All policies that come with the library, but policies/data_parallel.hpp: LibTorch's headers for several processes
// cost seconds.
#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/clip.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policies/metrics_log.hpp>
#include <gradaccum/policies/mixed_precision.hpp>
#include <gradaccum/policies/optimizer_in_backward.hpp>
#include <gradaccum/policies/progress.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/schedule.hpp>
