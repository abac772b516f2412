// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>

namespace gradaccum {

/// Counts the micro-batches of a window and their weights; knows no tensor.
///
///     ga::Window window(4);
///     for (auto& batch : batches) {
///       window.add(batch.data.size(0));            // this micro-batch is a mean over so many items
///       if (window.full()) window.restart();       // after the step: mean = sum · first_weight() / total_weight()
///     }
///
/// Weights enter backward relative to the window's first one, so that 16-bit gradients keep their magnitude.
class Window {
 public:
  explicit Window(std::int64_t steps = 1) : steps_(checked(steps)), next_steps_(steps) {}

  /// Counts one micro-batch of this weight: finite and >= 0.
  void add(double weight) {
    check_weight(weight);
    TORCH_CHECK(std::isfinite(total_weight_ + weight), "Loss: the weights of a window must have a finite sum, got ",
                total_weight_, " + ", weight);
    ++count_;
    if (first_weight_ == 0) first_weight_ = weight;
    total_weight_ += weight;
  }
  static void check_weight(double weight) {
    TORCH_CHECK(std::isfinite(weight) && weight >= 0, "Loss: a weight must be finite and >= 0, got ", weight);
  }

  std::int64_t count() const { return count_; }
  std::int64_t steps() const { return steps_; }
  bool full() const { return count_ >= steps_; }
  double first_weight() const { return first_weight_; }  ///< the first that is not 0; 0 while there is none
  double total_weight() const { return total_weight_; }

  /// Takes effect with the next window; with this one, if it has no micro-batch yet.
  void set_steps(std::int64_t steps) {
    next_steps_ = checked(steps);
    if (count_ == 0) steps_ = steps;
  }
  void restart() { *this = Window(next_steps_); }

  /// Goes on with a window that was saved.
  void resume(std::int64_t count, double first_weight, double total_weight) {
    check_weight(first_weight);
    check_weight(total_weight);
    TORCH_CHECK(count >= 0 && (count > 0 || total_weight == 0) && (first_weight > 0) == (total_weight > 0),
                "Window: a saved one must have a count >= 0 and weights that fit, got ", count, ", ", first_weight,
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

}  // namespace gradaccum
