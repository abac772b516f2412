// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/window.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

#include <cmath>

namespace gradaccum {

GRADACCUM_INLINE void Window::add(double weight) {
  check_weight(weight);
  TORCH_CHECK(std::isfinite(total_weight_ + weight), "Loss: the items of a window must have a finite sum, got ",
              total_weight_, " + ", weight);
  ++count_;
  if (first_weight_ == 0) first_weight_ = weight;
  total_weight_ += weight;
}

GRADACCUM_INLINE void Window::check_weight(double weight) {
  TORCH_CHECK(std::isfinite(weight) && weight >= 0, "Loss: items must be finite and >= 0, got ", weight);
}

GRADACCUM_INLINE void Window::set_steps(std::int64_t steps) {
  next_steps_ = checked(steps);
  if (count_ == 0) steps_ = steps;
}

GRADACCUM_INLINE void Window::resume(std::int64_t count, double first_weight, double total_weight) {
  check_weight(first_weight);
  check_weight(total_weight);
  TORCH_CHECK(count >= 0 && (count > 0 || total_weight == 0) && (first_weight > 0) == (total_weight > 0),
              "Window: a saved one must have a count >= 0 and items that fit, got ", count, ", ", first_weight,
              " and ", total_weight);
  count_ = count, first_weight_ = first_weight, total_weight_ = total_weight;
}

GRADACCUM_INLINE std::int64_t Window::checked(std::int64_t steps) {
  TORCH_CHECK(steps >= 1, "GradAccumulator: steps must be >= 1, got ", steps);
  return steps;
}

}  // namespace gradaccum
