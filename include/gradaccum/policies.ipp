// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies.hpp>

#ifdef GRADACCUM_COMPILED
#include <gradaccum/trainer_base.hpp>

namespace gradaccum::detail {
template class PolicyOf<Accumulate>;
template class PolicyOf<ClipNorm>;
template class PolicyOf<ClipValue>;
template class PolicyOf<EarlyStopping>;
template class PolicyOf<Ema>;
template class PolicyOf<MetricsLog>;
template class PolicyOf<MixedPrecision>;
template class PolicyOf<OptimizerInBackward>;
template class PolicyOf<Progress>;
template class PolicyOf<SaveState>;
}  // namespace gradaccum::detail
#endif
