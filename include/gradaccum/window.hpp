// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>

namespace gradaccum {

/// Counts the micro-batches of a window and their weights. Has nothing to do with tensors.
///
///     ga::Window window(4);
///     for (auto& batch : batches) {
///       window.add(batch.data.size(0));            // this micro-batch is a mean over so many items
///       if (window.full()) window.restart();       // after the step: mean = sum · first_weight() / total_weight()
///     }
///
/// Weights enter backward relative to the window's first one, which keeps the magnitude of 16-bit gradients.
class Window {
 public:
  explicit Window(std::int64_t steps = 1) : steps_(checked(steps)), next_steps_(steps) {}

  /// Counts a micro-batch of this weight, finite and >= 0.
  void add(double weight);
  static void check_weight(double weight);

  std::int64_t count() const { return count_; }
  std::int64_t steps() const { return steps_; }
  bool full() const { return count_ >= steps_; }
  double first_weight() const { return first_weight_; }  ///< the first nonzero weight, or 0
  double total_weight() const { return total_weight_; }

  /// Sets the steps from the next window on, or of this one if it has no micro-batch yet.
  void set_steps(std::int64_t steps);
  /// Sets the steps of this window alone, at any time.
  void set_steps_of_this(std::int64_t steps) { steps_ = checked(steps); }
  void restart() { *this = Window(next_steps_); }

  /// Continues a window that was saved.
  void resume(std::int64_t count, double first_weight, double total_weight);

 private:
  static std::int64_t checked(std::int64_t steps);

  std::int64_t steps_, next_steps_, count_ = 0;
  double first_weight_ = 0, total_weight_ = 0;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/window.ipp>
#endif
