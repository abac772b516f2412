// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/dense.hpp>
#include <gradaccum/detail/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Finds the gradients of a window by their parameters.
class GradientsByParameter {
 public:
  explicit GradientsByParameter(const Gradients& gradients) : raw_(gradients.raw()) {
    const auto parameters = gradients.parameters();
    for (std::size_t i = 0; i < raw_.size(); ++i) index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
  }
  const at::Tensor& operator()(const at::Tensor& parameter) const {
    static const at::Tensor none;
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    return found == index_.end() ? none : raw_[found->second];
  }

 private:
  std::vector<at::Tensor> raw_;
  std::unordered_map<const void*, std::size_t> index_;
};

/// Notices a parameter that is listed twice: it would be stepped twice, at the same time. Looks closely only where the
/// list has changed.
class DistinctParameters {
 public:
  void check(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::size_t i = 0;
    bool same = true;
    for (auto& group : groups)
      for (auto& parameter : group.params()) {
        const void* const impl = parameter.unsafeGetTensorImpl();
        if (same && i < known_.size() && known_[i] == impl) continue_at(i);
        else same = false;
      }
    if (same && i == known_.size()) return;
    look(optimizer, groups);
  }

 private:
  static void continue_at(std::size_t& i) { ++i; }
  void look(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
    std::unordered_set<const void*> seen;
    std::vector<const void*> all;
    for (auto& group : groups)
      for (auto& parameter : group.params()) {
        all.push_back(parameter.unsafeGetTensorImpl());
        TORCH_CHECK(seen.insert(all.back()).second, optimizer, ": a parameter of shape ", parameter.sizes(),
                    " is listed twice; list it once, in one group");
      }
    known_ = std::move(all);
  }

  std::vector<const void*> known_;
};

/// LibTorch's optimizer `Base`, with a step of our own: `Derived` has `move(gradient_of, multiplier)`, which steps all
/// parameters that have a gradient. Options, state, groups, saving and loading are LibTorch's.
template <class Base, class Derived>
class OnePassOptimizer : public Base, public TakesGradients {
 public:
  using Base::Base;
  using LossClosure = torch::optim::Optimizer::LossClosure;

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    move([](const at::Tensor& parameter) -> const at::Tensor& { return parameter.grad(); }, {});
    return loss;
  }

  void step(Gradients gradients) override {
    if (!gradients.overflowed()) move(GradientsByParameter(gradients), product_of(gradients));
  }

 private:
  template <class GradientOf>
  void move(const GradientOf& gradient_of, const Multiplier& multiplier) {
    at::NoGradGuard no_grad;
    distinct_.check(Derived::name, this->param_groups());
    static_cast<Derived&>(*this).move(gradient_of, multiplier);
  }

  DistinctParameters distinct_;
};

/// The number type of the parameter's own memory in which it is stepped.
inline at::ScalarType working_type(const at::Tensor& parameter) {
  if (!parameter.device().is_cpu()) return state_type(parameter);  // ATen's operations want one type for all
  const auto number = at::toRealValueType(parameter.scalar_type());
  const bool known = number == at::kDouble || number == at::kFloat || number == at::kHalf || number == at::kBFloat16;
  return known && parameter.scalar_type() != at::kComplexHalf ? parameter.scalar_type() : state_type(parameter);
}

/// The gradient, its elements in the parameter's order. Those of 16-bit parameters may be float32 sums.
inline at::Tensor working_gradient(const at::Tensor& dense, const at::Tensor& gradient) {
  const bool same = gradient.scalar_type() == dense.scalar_type();
  return in_order_of(dense, gradient, same ? gradient.scalar_type() : state_type(dense));
}

/// Takes the steps of parameters on the CPU, and those of all others.
template <class Step>
void take(std::vector<Step> steps, const Multiplier& multiplier) {
  std::vector<Step> on_device;
  std::erase_if(steps, [&](Step& step) {
    const bool away = !step.gradient.device().is_cpu();
    if (away) on_device.push_back(std::move(step));
    return away;
  });
  if (!steps.empty())
    take_on_cpu(steps, multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).template item<double>());
  if (!on_device.empty()) take_on_device(on_device, multiplier);
  for (auto& step : steps) step.parameter.write_back();
  for (auto& step : on_device) step.parameter.write_back();
}

}  // namespace gradaccum::detail
