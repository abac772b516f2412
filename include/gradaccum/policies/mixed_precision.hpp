// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/policy.hpp>

#include <c10/core/ScalarType.h>

namespace gradaccum {

/// Policy: runs the objective under autocast on the model's device, and scales the loss with float16.
///
///     ga::Trainer trainer(model, sgd, objective,
///                         ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 1024.0}});
///     trainer.fit(batches);
///     std::cout << trainer.policy<ga::MixedPrecision>().amp_scaler->get_scale() << '\n';
///
/// See `Autocast` and `AmpScaler`, which do the work.
///
/// @note With float16, reads 4 bytes from the device per window.
struct MixedPrecision {
  static constexpr std::string_view name = "mixed_precision";

  at::ScalarType dtype = at::kBFloat16;             ///< or kHalf
  bool enabled = true;                              ///< false: the policy does nothing
  AmpScalerOptions scaler = {};                     ///< options of the loss scale, used with float16 only
  std::shared_ptr<AmpScaler> amp_scaler = nullptr;  ///< constructed from these options with the trainer
  TrainerBase* trainer = nullptr;                   ///< not an option, like the one before

  void attach(TrainerBase& to);
  std::optional<Autocast> forward_scope() const;
  void before_backward(Loss& loss);
  void scale_gradients(Factor& factor) const;
  void after_window(const Step& step);
  void state(Archive& archive);  ///< has a loss scale with float16 only
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/mixed_precision.ipp>
#endif
