// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/batch_divider.hpp>
#include <gradaccum/detail/trainer/counts.hpp>
#include <gradaccum/detail/trainer/data_position.hpp>
#include <gradaccum/detail/trainer/policy_list.hpp>
#include <gradaccum/detail/trainer/window_record.hpp>
#include <gradaccum/detail/window/open_window.hpp>
#include <gradaccum/fit_options.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What a Trainer has that is of no user's type.
struct TrainerParts {
  explicit TrainerParts(std::unique_ptr<AnyOptimizer> optimizer) : window(std::move(optimizer)) {}

  OpenWindow window;
  PolicyList policies;
  WindowRecord record;
  DataPosition data;
  Counts counts;
  FitStatus status;
  std::unique_ptr<BatchDivider> divider;  // or none
  std::int64_t batch_size = 0;            // samples of a window, where somebody counts them
  std::vector<std::string> metrics;       // of all that evaluates inside of fit: validation/loss
  std::vector<std::function<void()>> when_built;
  bool is_built = false;
};

}  // namespace gradaccum::detail
