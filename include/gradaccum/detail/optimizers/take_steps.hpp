// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/multiplier.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <unordered_map>
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

/// Takes the steps of parameters on the CPU, and those of all others.
template <class Step>
void take(const std::vector<Step>& steps, const Multiplier& multiplier) {
  const auto on_cpu = [](const Step& step) { return step.parameter.device().is_cpu(); };
  const auto count = std::count_if(steps.begin(), steps.end(), on_cpu);
  if (count > 0 && count < std::ssize(steps)) {
    std::vector<Step> here, away;
    std::partition_copy(steps.begin(), steps.end(), std::back_inserter(here), std::back_inserter(away), on_cpu);
    take(here, multiplier);
    take(away, multiplier);
  } else if (count > 0) {
    take_on_cpu(steps, multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).template item<double>());
  } else if (!steps.empty()) {
    take_on_device(steps, multiplier);
  }
}

}  // namespace gradaccum::detail
