// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/policy.hpp>

#include <c10/core/ScalarType.h>

namespace gradaccum {

/// Policy: the objective runs under autocast, and with float16 its loss is scaled.
///
///     ga::Trainer trainer(model, sgd, objective,
///                         ga::MixedPrecision{.dtype = torch::kHalf, .scaler = {.init_scale = 1024.0}});
///     trainer.fit(batches);
///     std::cout << trainer.policy<ga::MixedPrecision>().amp_scaler->get_scale() << '\n';
///
/// `Autocast` and `AmpScaler` are the parts, whose documentation says the rest. The device is the model's.
///
/// @note With float16, reads 4 bytes from the device a window.
struct MixedPrecision {
  static constexpr std::string_view name = "mixed_precision";

  at::ScalarType dtype = at::kBFloat16;             ///< or kHalf
  bool enabled = true;                              ///< if not, it does nothing
  AmpScalerOptions scaler = {};                     ///< options of the loss scale, which only float16 has
  std::shared_ptr<AmpScaler> amp_scaler = nullptr;  ///< made of these options when the trainer is built
  TrainerBase* trainer = nullptr;                   ///< not an option, like the one before

  void attach(TrainerBase& to);
  std::optional<Autocast> forward_scope() const;
  void before_backward(Loss& loss);
  void scale_gradients(Factor& factor) const;
  void after_window(const Step& step);
  void state(Archive& archive);  ///< none with bfloat16
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/mixed_precision.ipp>
#endif
