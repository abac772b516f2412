// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

// Includes the policies that most programs use. The others take longer to compile, such as policies/data_parallel.hpp
// and policies/fit_memory.hpp: include them only in files that use them.
#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/clip.hpp>
#include <gradaccum/policies/early_stopping.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policies/guard_norm.hpp>
#include <gradaccum/policies/metrics_log.hpp>
#include <gradaccum/policies/mixed_precision.hpp>
#include <gradaccum/policies/optimizer_in_backward.hpp>
#include <gradaccum/policies/progress.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/schedule.hpp>
#include <gradaccum/policies/validate.hpp>
