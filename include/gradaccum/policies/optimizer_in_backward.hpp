// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>

namespace gradaccum {

/// Policy: the backward pass that fills a window steps each parameter as its gradient arrives, and frees the gradient.
///
///     ga::optim::AdamW adamw(model->parameters(), 1e-3);
///     ga::Trainer trainer(model, adamw, objective, ga::OptimizerInBackward{});
///     trainer.fit(batches);
///
/// `GradAccumulatorOptions::in_backward` says the rest: parameters, state and reports are those without it, to the bit.
/// With it go no policies that need all gradients at once: clipping, before_step, a loss scale.
/// `after_backward` finds no gradients in the micro-batch that fills the window; `before_close` and
/// `scale_gradients` come before it.
///
/// @note Synchronizes, to see that losses are finite, before that backward, not after it. Gradients are looked
/// at on the CPU alone, each before it is stepped with: others may have been by then.
struct OptimizerInBackward {
  static constexpr std::string_view name = "optimizer_in_backward";

  template <class Trainer>
  void attach(Trainer& trainer) const {
    constexpr bool needs_all =
        Trainer::template acts_in<hooks::before_step> || Trainer::template has<hooks::others_continue>;
    static_assert(!needs_all,
                  "OptimizerInBackward: a policy with before_step (ClipNorm, ClipValue), or of several processes "
                  "(DataParallel), needs all gradients at once, and here each is freed as it arrives; leave one of the "
                  "two out");
    if constexpr (!needs_all) trainer.set_in_backward(true);
  }
};

}  // namespace gradaccum
