// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>

namespace gradaccum {
class Archive;
class Factor;
struct Loss;
}  // namespace gradaccum

namespace gradaccum::detail {

/// What an open window has been used for so far, which decides what it may be used for next; else an error says why.
class WindowUse {
 public:
  /// Whose backward it is: plain, the user's `loss.backward()`; weighted, `optimizer.backward(loss)`.
  enum class Form { none, plain, weighted };

  /// A micro-batch is in hand from its backward on until the window has taken notice of it.
  void begin(Form form) { form_ = form, in_hand_ = true; }
  void end() { in_hand_ = false; }
  bool in_hand() const { return in_hand_; }
  bool weighted() const { return form_ == Form::weighted; }

  /// An exception came in the middle of a change of the gradients.
  void spoil() { spoiled_ = true; }
  bool spoiled() const { return spoiled_; }
  /// The seed of a backward had a scale, which has to be divided out.
  void take_seed(const Factor& seed);
  bool scaled() const { return scaled_; }

  void check_usable(bool stepped) const;
  void check_form(Form form) const;
  void check_none_in_hand() const;
  /// The scaler that scaled the losses must have asked for the reverse.
  void check_scaler(bool must_be_finite) const;

  /// Between two micro-batches, of which there are so many.
  void state(Archive& archive, std::int64_t micro_batches);

 private:
  Form form_ = Form::none;
  bool in_hand_ = false, spoiled_ = false, scaled_ = false;
};

/// The seed of backward has the dtype of the loss, and must fit: it is the weight, relative to the window's first one.
void check_weight(const Loss& loss, double first_weight);

void check_goes_with_peers(bool peers, bool in_backward);

/// Before anything has moved: what comes too late once a parameter has.
void check_can_step_in_backward(bool scaled, bool create_graph);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/window_use.ipp>
#endif
