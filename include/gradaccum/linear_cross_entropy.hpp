// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: window

#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace gradaccum {

/// Options of `linear_cross_entropy`.
struct LinearCrossEntropyOptions {
  at::Tensor bias = {};              ///< [classes], added to the logits
  at::Tensor weights = {};           ///< of the tokens, in the shape of the target; the mean is weighted
  std::int64_t ignore_index = -100;  ///< tokens with this target count nothing
  double label_smoothing = 0;        ///< in [0, 1]: this part of each target is spread over all classes
  double z_loss = 0;                 ///< adds this times the square of the logits' logsumexp
  std::int64_t memory_budget = std::int64_t{128} << 20;  ///< bytes of logits at a time, but at least one token
  std::optional<double> items = {};  ///< the loss's `items`, if the host knows them; `mean` does not depend on it
};

/// Computes `cross_entropy(linear(hidden, weight), target)` without making all logits: as the last layer of a language
/// model with any vocabulary.
///
///     auto hidden = torch::randn({4, 32, 16}).requires_grad_();    // [batch, tokens, width]
///     auto head = torch::randn({5000, 16}).requires_grad_();       // [vocabulary, width]
///     auto target = torch::randint(5000, {4, 32});
///     ga::Loss loss = ga::linear_cross_entropy(hidden, head, target);
///     loss.backward();                                             // or optimizer.backward(loss)
///
/// Logits of a few tokens exist at a time. For a first gradient in float32, forward computes the gradients, too, by
/// three products of matrices, as usual; otherwise backward computes the logits once more, by a fourth. `hidden`: [...,
/// width]. `weight`: [classes, width]. `target`: int64 in the shape of `hidden` without its width. `mean` is over the
/// tokens that are not ignored, 0 if there are none, and `items` is their number. `output` has the loss of each token,
/// 0 if ignored, detached, for scoring.
///
/// Precision. Products have the dtype of `weight`, or autocast's; everything else is float32 (float64 for float64).
/// The gradient of `weight` is summed over the logits' parts in float32, also for 16-bit weights.
///
/// Memory. Backward adds to an existing gradient of `weight` in place, as `embedding` does, so that a window has one
/// table, also with tied weights. For a first gradient, 16-bit weights, a hook or inside `SavedTensorHooks` a table in
/// float32 is made; one that forward has made is held until backward. Autocast's 16-bit copy of `weight` is not
/// counted.
///
/// Steps that are captured or compiled keep the host's `items`: give `.items = 1`, and weigh the result outside, by
/// `ga::Loss{step(batch).mean, tokens}`. `save_step` records the call, and a compiled step makes logits of
/// some tokens of all rows at a time, within the budget for the recorded batch, or a 64th of all; in float16 it makes
/// all.
///
/// @note Counting the tokens synchronizes with a device, unless `.items` is given. Double backward is an error.
Loss linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                          const LinearCrossEntropyOptions& options = {});

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/linear_cross_entropy.ipp>
#endif
