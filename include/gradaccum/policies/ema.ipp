// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/ema.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <algorithm>

namespace gradaccum {

GRADACCUM_INLINE void Ema::after_step(const Step&) { update(*module); }

GRADACCUM_INLINE void Ema::state(Archive& archive) {
  if (!archive.loading()) return averages.save(archive);
  TORCH_CHECK(module, "Ema: to load needs the model; call attach(model) first");
  averages.load(archive, *module, buffers);
}

GRADACCUM_INLINE double Ema::decay_now() const {
  TORCH_CHECK(decay >= 0 && decay <= 1, "Ema: decay must be in [0, 1], got ", decay);
  const auto t = static_cast<double>(updates());
  return warmup ? std::min(decay, (1 + t) / (10 + t)) : decay;
}

}  // namespace gradaccum
