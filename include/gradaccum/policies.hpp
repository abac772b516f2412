// SPDX-License-Identifier: Apache-2.0
#pragma once

// Includes the policies that most programs use. The others take longer to compile, such as policies/data_parallel.hpp
// and policies/fit_memory.hpp: include them only in files that use them.
#include <gradaccum/detail/trainer/any_policy.hpp>
#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/clip.hpp>
#include <gradaccum/policies/early_stopping.hpp>
#include <gradaccum/policies/ema.hpp>
#include <gradaccum/policies/metrics_log.hpp>
#include <gradaccum/policies/mixed_precision.hpp>
#include <gradaccum/policies/optimizer_in_backward.hpp>
#include <gradaccum/policies/progress.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/schedule.hpp>
#include <gradaccum/policies/validate.hpp>

#ifdef GRADACCUM_COMPILED
namespace gradaccum::detail {
extern template class PolicyOf<Accumulate>;
extern template class PolicyOf<ClipNorm>;
extern template class PolicyOf<ClipValue>;
extern template class PolicyOf<EarlyStopping>;
extern template class PolicyOf<Ema>;
extern template class PolicyOf<MetricsLog>;
extern template class PolicyOf<MixedPrecision>;
extern template class PolicyOf<OptimizerInBackward>;
extern template class PolicyOf<Progress>;
extern template class PolicyOf<ReduceLROnPlateau>;
extern template class PolicyOf<SaveState>;
}  // namespace gradaccum::detail
#endif
