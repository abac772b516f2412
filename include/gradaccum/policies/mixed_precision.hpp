// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/policy.hpp>

#include <c10/core/ScalarType.h>

namespace gradaccum {

namespace detail {
struct MixedPrecisionRun;
}

/// Policy: runs the objective under autocast on the model's device, and scales the loss with float16.
///
///     ga::Trainer trainer(model, sgd, objective,
///                         ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 1024.0}});
///     trainer.fit(batches);
///     std::cout << trainer.policy<ga::MixedPrecision>().amp_scaler().get_scale() << '\n';
///
/// See `Autocast` and `AmpScaler`, which do the work.
///
/// @note With float16, reads 4 bytes from the device per window.
struct MixedPrecision {
  static constexpr std::string_view name = "mixed_precision";

  at::ScalarType dtype = at::kBFloat16;  ///< or kHalf
  bool enabled = true;                   ///< false: the policy does nothing
  AmpScalerOptions scaler = {};          ///< options of the loss scale, used with float16 only

  class Running;
};

/// A MixedPrecision in a Trainer: what `trainer.policy<ga::MixedPrecision>()` returns.
class MixedPrecision::Running : public MixedPrecision {
 public:
  using Options = MixedPrecision;
  explicit Running(MixedPrecision given) : MixedPrecision(std::move(given)) {}
  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);

  AmpScaler& amp_scaler() const;  ///< disabled, except with float16

 private:
  std::shared_ptr<detail::MixedPrecisionRun> run_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/mixed_precision.ipp>
#endif
