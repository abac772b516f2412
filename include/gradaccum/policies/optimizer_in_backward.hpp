// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/policy.hpp>

namespace gradaccum {

/// Policy: updates each parameter during the backward pass that fills a window, and then frees its gradient.
///
///     ga::optim::AdamW adamw(model->parameters(), 1e-3);
///     ga::Trainer trainer(model, adamw, objective, ga::OptimizerInBackward{});
///     trainer.fit(batches);
///
/// Parameters, state and reports are bitwise the same as without it; see `GradAccumulatorOptions::in_backward`. Cannot
/// be combined with policies that need all gradients of a window: clipping, `before_step`, a loss scale. `before_close`
/// and `scale_gradients` are called before the backward pass that fills the window, and `after_backward` finds no
/// gradients after it.
///
/// @note Checks losses before that backward pass rather than after it, which synchronizes with the device. Checks
/// gradients for non-finite values on the CPU only, each before its own update, when others may have been applied.
struct OptimizerInBackward {
  static constexpr std::string_view name = "optimizer_in_backward";

  template <class Trainer>
  void attach(Trainer& trainer) const {
    constexpr bool needs_all =
        Trainer::template has<hooks::before_step> || Trainer::template has<hooks::others_continue>;
    static_assert(
        !needs_all,
        "OptimizerInBackward: a policy with before_step (ClipNorm, ClipValue, GuardNorm), or of several processes "
        "(DataParallel), needs all gradients at once, and here each is freed as it arrives; leave one of the "
        "two out");
    if constexpr (!needs_all) trainer.set_in_backward(true);
  }
};

}  // namespace gradaccum
