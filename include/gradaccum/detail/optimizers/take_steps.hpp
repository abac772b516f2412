// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/moves.hpp>
#include <gradaccum/detail/window/multiplier.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Finds the gradient of a parameter: its own, or that of a window.
class GradientOf {
 public:
  GradientOf() = default;
  explicit GradientOf(const Gradients& gradients) : of_window_(true), raw_(gradients.raw()) {
    const auto parameters = gradients.parameters();
    for (std::size_t i = 0; i < raw_.size(); ++i) index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
  }

  bool empty() const { return raw_.empty(); }  ///< of a window
  const at::Tensor& operator()(const at::Tensor& parameter) const {
    if (!of_window_) return parameter.grad();
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    return found == index_.end() ? none_ : raw_[found->second];
  }

 private:
  bool of_window_ = false;
  std::vector<at::Tensor> raw_;
  std::unordered_map<const void*, std::size_t> index_;
  at::Tensor none_;
};

/// Adds the steps of parameters on the CPU, and the moves of those on devices. `steps` live until they have run.
template <class Step>
void add_steps(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  std::vector<Step> here, away;
  const auto on_cpu = [](const Step& step) { return step.parameter.device().is_cpu(); };
  const bool all_here = std::all_of(steps.begin(), steps.end(), on_cpu);
  if (!all_here)
    std::partition_copy(steps.begin(), steps.end(), std::back_inserter(here), std::back_inserter(away), on_cpu);
  add_moves(moves, away, multiplier);
  if (all_here ? steps.empty() : here.empty()) return;
  const auto by = multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).template item<double>();
  if (all_here)
    moves.add([&steps, by] { take_on_cpu(steps, by); });
  else
    moves.add([here = std::move(here), by] { take_on_cpu(here, by); });
}

}  // namespace gradaccum::detail
