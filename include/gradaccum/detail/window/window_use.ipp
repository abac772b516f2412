// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/window_use.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/step_in_backward.hpp>
#include <gradaccum/loss.hpp>
#include <gradaccum/window.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void WindowUse::take_seed(const Factor& seed) { scaled_ = scaled_ || finite_required(seed); }

GRADACCUM_INLINE void WindowUse::check_usable(bool stepped) const {
  TORCH_CHECK(!spoiled_ || !stepped, "GradAccumulator: ", stepped_in_part);
  TORCH_CHECK(!spoiled_, "GradAccumulator: an exception left this window's gradients incomplete; call discard()");
}

GRADACCUM_INLINE void WindowUse::check_form(Form form) const {
  TORCH_CHECK(form_ == Form::none || form_ == form,
              "GradAccumulator: one window mixes optimizer.backward(loss) with loss.backward() or with a step() that "
              "no backward precedes; use one form");
}

GRADACCUM_INLINE void WindowUse::check_none_in_hand() const {
  TORCH_CHECK(!in_hand_, "GradAccumulator: a second backward() before step(); add the losses and call it once");
}

GRADACCUM_INLINE void WindowUse::check_scaler(bool must_be_finite) const {
  TORCH_CHECK(!scaled_ || must_be_finite,
              "GradAccumulator: the losses of this window are scaled, and its gradients are not to be divided by the "
              "scale; call scaler.step(optimizer) in place of optimizer.step()");
}

GRADACCUM_INLINE void WindowUse::state(Archive& archive, std::int64_t micro_batches) {
  bool is_weighted = weighted();
  archive("weighted", is_weighted);
  archive("scaled", scaled_);
  if (archive.loading()) form_ = micro_batches == 0 ? Form::none : is_weighted ? Form::weighted : Form::plain;
}

GRADACCUM_INLINE void check_weight(const Loss& loss, double first_weight) {
  Window::check_weight(loss.items);
  if (loss.items == 0 || first_weight == 0) return;
  const double largest = loss.mean.scalar_type() == at::kHalf     ? 65504.0
                         : loss.mean.scalar_type() == at::kDouble ? 1e308
                                                                  : 3e38;
  TORCH_CHECK(loss.items / first_weight <= largest, "Loss: items must be at most ", largest,
              " times those of the window's first micro-batch (", first_weight, ") with a loss of dtype ",
              loss.mean.scalar_type(), ", got ", loss.items, "; compute the loss in a wider dtype");
}

GRADACCUM_INLINE void check_goes_with_peers(bool peers, bool in_backward) {
  TORCH_CHECK(!peers || !in_backward,
              "GradAccumulator: in_backward frees each gradient as it arrives, before it could be summed over the "
              "other processes; leave one of the two out");
}

GRADACCUM_INLINE void check_can_step_in_backward(bool scaled, bool create_graph) {
  TORCH_CHECK(!create_graph,
              "GradAccumulator: create_graph keeps the gradients, which in_backward frees as they arrive; "
              "leave one of the two out");
  TORCH_CHECK(!scaled,
              "GradAccumulator: a loss scaler looks at all gradients before the first parameter moves, and in_backward "
              "steps each as it arrives; use bfloat16, which needs no scaler, or leave in_backward out");
}

}  // namespace gradaccum::detail
