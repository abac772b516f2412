// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/archive.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/policy.hpp>

#include <limits>

namespace gradaccum {

/// Rejects windows whose gradients have an unusually large norm: a policy that also works in a loop of your own.
///
///     ga::GradAccumulator optimizer(sgd, {.steps = 2});
///     ga::GuardNorm::Running guard({.max = 100.0, .max_ratio = 5.0});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.ready()) guard.before_step(optimizer.gradients());
///       if (optimizer.step() == ga::StepResult::rejected) std::cout << "a bad batch\n";
///       optimizer.zero_grad();
///     }
///
/// A rejected window changes neither the parameters nor the optimizer's state and step counts, a schedule, an Ema or
/// the growth of a loss scale. The forward pass has already changed buffers, such as BatchNorm's statistics, and random
/// numbers.
///
/// Norms. The L2 norm of the mean gradients before clipping must be at most `max`, and at most `max_ratio` times a
/// quantile of the last norms. The quantile needs `history` / 2 norms. Norms of rejected windows are among them, so
/// that `max_ratio` follows norms that stay large. Norms of NaN or infinity are rejected, too, after `OnNan` and a loss
/// scaler, which lowers its scale. Place it before `ClipValue` and policies that change gradients, and in a loop with
/// an AmpScaler behind `scaler.unscale_(optimizer)`.
///
/// Reports. `FitReport::first_rejected` names the first batch. Resuming: a state contains the norms. Ranks: all have
/// the same norm, and reject the same windows.
///
/// @note One read of the gradients, which clipping by the norm and the check for NaN share. Reads 8 bytes per window
/// from a device, which synchronizes.
struct GuardNorm {
  static constexpr std::string_view name = "guard_norm";

  double max = std::numeric_limits<double>::infinity();        ///< > 0; infinite: no limit
  double max_ratio = std::numeric_limits<double>::infinity();  ///< > 0; limit of norm / quantile; infinite: no limit
  double quantile = 0.5;                                       ///< in [0, 1]; 0.5 is the median
  std::int64_t history = 128;                                  ///< number of last norms for the quantile, >= 1

  class Running;
};

/// A GuardNorm in a Trainer, or in a loop of your own.
class GuardNorm::Running : public GuardNorm {
 public:
  using Options = GuardNorm;
  explicit Running(const GuardNorm& given) : GuardNorm(given) { check(); }

  void before_step(Gradients gradients);
  const std::vector<double>& norms() const { return norms_; }  ///< the last norms
  double limit() const;                                        ///< the lower of the two limits, from these norms
  void state(Archive& archive);

 private:
  void check() const;

  std::vector<double> norms_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/guard_norm.ipp>
#endif
