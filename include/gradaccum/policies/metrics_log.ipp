// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/metrics_log.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <limits>

namespace gradaccum {

GRADACCUM_INLINE void MetricsLog::attach(TrainerBase& trainer) {
  TORCH_CHECK(every >= 1, "MetricsLog: every must be >= 1, got ", every);
  status = &trainer.status();
  if (trainer.is_first()) file = std::make_shared<MetricsFile>(MetricsFileOptions{.path = path, .append = append});
}

GRADACCUM_INLINE void MetricsLog::after_window(const Step& step) {
  if (++windows % every == 0 && file) write(step);
}

GRADACCUM_INLINE void MetricsLog::write(const Step& step) const {
  const auto norm = step.grad_norm.defined() ? step.grad_norm.item<double>() : std::numeric_limits<double>::quiet_NaN();
  file->write({{"update", step.update},
               {"epoch", step.epoch},
               {"samples", status->samples},
               {"items", step.items},
               {"micro_batches", step.micro_batches},
               {"moved", step.moved},
               {"loss", step.loss.item<double>()},
               {"grad_norm", norm},
               {"lr", step.lr},
               {"seconds", status->seconds()}});
}

}  // namespace gradaccum
