// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <cstdint>

namespace gradaccum::detail {

/// Counts the micro-batches of a window and their weights, without tensors.
///
/// Weights are used relative to the window's first one, which keeps the magnitude of 16-bit gradients: the mean is the
/// sum of the gradients times first_weight() / total_weight().
class Window {
 public:
  explicit Window(std::int64_t steps = 1) : steps_(checked(steps)), next_steps_(steps) {}

  static void check_weight(double weight) {
    TORCH_CHECK(is_finite(weight) && weight >= 0, "Loss: items must be finite and >= 0, got ", weight);
  }
  /// Counts a micro-batch of this weight.
  void add(double weight) {
    check_weight(weight);
    TORCH_CHECK(is_finite(total_weight_ + weight), "Loss: the items of a window must have a finite sum, got ",
                total_weight_, " + ", weight);
    ++count_;
    if (first_weight_ == 0) first_weight_ = weight;
    total_weight_ += weight;
  }

  std::int64_t count() const { return count_; }
  std::int64_t steps() const { return steps_; }
  bool full() const { return count_ >= steps_; }
  double first_weight() const { return first_weight_; }  ///< the first nonzero weight, or 0
  double total_weight() const { return total_weight_; }

  /// Sets the steps from the next window on, or from this one if it has no micro-batch yet.
  void set_steps(std::int64_t steps) {
    next_steps_ = checked(steps);
    if (count_ == 0) steps_ = steps;
  }
  /// Sets the steps of this window only, at any time.
  void set_steps_of_this(std::int64_t steps) { steps_ = checked(steps); }
  void restart() { *this = Window(next_steps_); }

  /// Continues a window that was saved.
  void resume(std::int64_t count, double first_weight, double total_weight) {
    check_weight(first_weight);
    check_weight(total_weight);
    TORCH_CHECK(count >= 0 && (count > 0 || total_weight == 0) && (first_weight > 0) == (total_weight > 0),
                "Window: a saved window must have a count >= 0 and items that fit it, got ", count, ", ", first_weight,
                " and ", total_weight);
    count_ = count, first_weight_ = first_weight, total_weight_ = total_weight;
  }

 private:
  static std::int64_t checked(std::int64_t steps) {
    TORCH_CHECK(steps >= 1, "GradAccumulator: steps must be >= 1, got ", steps);
    return steps;
  }

  std::int64_t steps_, next_steps_, count_ = 0;
  double first_weight_ = 0, total_weight_ = 0;
};

}  // namespace gradaccum::detail
