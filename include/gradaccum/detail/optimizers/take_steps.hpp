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

/// Finds the gradient of a parameter: its own, or the one in a window.
class GradientOf {
 public:
  GradientOf() = default;
  explicit GradientOf(const Gradients& gradients) : of_window_(true), raw_(gradients.raw()) {
    const auto parameters = gradients.parameters();
    for (std::size_t i = 0; i < raw_.size(); ++i) index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
  }

  bool empty() const { return raw_.empty(); }  ///< true if a window has no gradients
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

/// The steps of parameters on the CPU, which are taken once those on devices are in flight.
template <class Step>
struct StepsOnCpu {
  const std::vector<Step>* all = nullptr;  // all steps, if every parameter is on the CPU
  std::vector<Step> some = {};             // the steps on the CPU otherwise
  double multiplier = 1;

  const std::vector<Step>& steps() const { return all ? *all : some; }
};

/// Adds the moves of parameters on devices to `moves`. The result refers to `steps`.
template <class Step>
StepsOnCpu<Step> add_steps(Moves& moves, const std::vector<Step>& steps, const Multiplier& multiplier) {
  StepsOnCpu<Step> here;
  std::vector<Step> away;
  const auto on_cpu = [](const Step& step) { return step.parameter.device().is_cpu(); };
  if (std::all_of(steps.begin(), steps.end(), on_cpu))
    here.all = &steps;
  else
    std::partition_copy(steps.begin(), steps.end(), std::back_inserter(here.some), std::back_inserter(away), on_cpu);
  add_moves(moves, away, multiplier);
  if (!here.steps().empty())
    here.multiplier = multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).template item<double>();
  return here;
}

}  // namespace gradaccum::detail
