// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/amp_scaler.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/type_name.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace gradaccum {

GRADACCUM_INLINE AmpScaler::AmpScaler(AmpScalerOptions options)
    : scale_{.growth_factor = options.growth_factor,
             .backoff_factor = options.backoff_factor,
             .min_scale = options.min_scale,
             .growth_interval = options.growth_interval},
      enabled_(options.enabled),
      on_device_(options.on_device) {
  scale_.check();
  scale_.set(options.init_scale, "init_scale");
}

GRADACCUM_INLINE at::Tensor AmpScaler::scale(const at::Tensor& loss) {
  TORCH_CHECK(loss.defined(), "AmpScaler: the loss must be defined, got an undefined tensor");
  return enabled_ ? loss.mul(scale_on(loss.device())) : loss;
}

GRADACCUM_INLINE std::vector<at::Tensor> AmpScaler::scale(std::vector<at::Tensor> losses) {
  for (auto& loss : losses) loss = scale(loss);
  return losses;
}

GRADACCUM_INLINE Loss AmpScaler::scale(Loss loss) {
  if (!enabled_) return loss;
  loss.check();
  device_scale_ ? loss.seed.multiply(scale_on(loss.mean.device())) : loss.seed.multiply(scale_.value);
  loss.seed.require_finite();
  return loss;
}

GRADACCUM_INLINE void AmpScaler::unscale(Factor& factor) const {
  if (!enabled_) return;
  device_scale_ ? factor.divide_by_own(device_scale_->wide()) : factor.divide(scale_.value);
  on_device_ ? factor.require_finite_on_device() : factor.require_finite();
}

GRADACCUM_INLINE void detail::check_nothing_hides_behind(const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK(!dynamic_cast<const OptimizerFacade*>(&optimizer),
              "AmpScaler: an accumulator must not hide behind a torch::optim::Optimizer&, which knows nothing of its "
              "window; pass the accumulator itself");
  TORCH_CHECK(type_name(optimizer.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
              "AmpScaler: must not be given LBFGS, which calls its closure several times a step, each with gradients "
              "of its own; use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
}

GRADACCUM_INLINE void detail::check_none_is_half(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    const auto dtype = gradient.defined() ? gradient.scalar_type() : parameters[i].scalar_type();
    TORCH_CHECK(!parameters[i].requires_grad() || at::toRealValueType(dtype) != at::kHalf,
                "AmpScaler: parameters and gradients must not be float16, got parameter ", i, " (shape ",
                parameters[i].sizes(), "); keep parameters in float32 and run forward inside an Autocast");
  }
}

GRADACCUM_INLINE void AmpScaler::unscale_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator) {
  if (!enabled_) return;
  auto& state = state_of(optimizer);
  TORCH_CHECK(state.stage != Stage::unscaled,
              "AmpScaler: unscale_() has already been called on this optimizer since the last update()");
  TORCH_CHECK(state.stage != Stage::stepped, "AmpScaler: unscale_() after step(); call update() first");
  TORCH_CHECK(!accumulator || accumulator->ready(),
              "AmpScaler: unscale_() inside a window would mix unscaled sums with scaled ones to come; put it "
              "inside `if (optimizer.ready())`, after backward");
  join(state, optimizer, accumulator);
  if (accumulator) accumulator->gradients();  // counts a plain backward that has run
  state.gradients->apply();
  if (!state.gradients->raw().empty()) state.stage = Stage::unscaled;
}

GRADACCUM_INLINE StepResult AmpScaler::step_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator) {
  if (!enabled_) return accumulator ? accumulator->step() : take_step(optimizer, Gradients(optimizer.parameters()));
  auto& state = state_of(optimizer);
  TORCH_CHECK(state.stage != Stage::stepped,
              "AmpScaler: step() has already been called on this optimizer since the last update()");
  join(state, optimizer, accumulator);
  if (!accumulator) state.stage = Stage::stepped;  // even if it throws: gradients may be multiplied already
  const auto result = accumulator ? accumulator->step() : take_step(optimizer, *state.gradients);
  if (result == StepResult::accumulated) return result;
  state.stage = Stage::stepped;
  if (state.one_batch) state.one_batch->close();
  note(result, state);
  return result;
}

/// Notes the result of a window that was flushed or discarded outside the scaler, and replaces its state.
GRADACCUM_INLINE AmpScaler::PerOptimizer& AmpScaler::state_of(const detail::AnyOptimizer& optimizer) {
  auto& state = optimizers_[optimizer.address()];
  if (!state.closed() || state.stage == Stage::stepped) return state;
  note(state.result(), state);
  return state = {};
}

GRADACCUM_INLINE void AmpScaler::join(PerOptimizer& state, const detail::AnyOptimizer& optimizer,
                                      Accumulator* accumulator) {
  if (!state.closed()) return;  // already joined
  const auto parameters = optimizer.parameters();
  detail::check_none_is_half(parameters);
  PerOptimizer joined{.accumulator = accumulator};
  if (!accumulator) joined.one_batch = std::make_shared<detail::WindowGradients>(parameters);
  joined.gradients = accumulator ? accumulator->gradients() : Gradients(joined.one_batch);
  unscale(joined.gradients->factor());
  state = std::move(joined);
}

/// A window counts only if it was unscaled, or about to be stepped, for example by an accumulator's `flush()`.
GRADACCUM_INLINE StepResult AmpScaler::PerOptimizer::result() {
  const bool judged = gradients && gradients->closed() && gradients->judged();
  if (stage == Stage::stepped || (!judged && stage != Stage::unscaled)) return StepResult::empty;
  if (judged ? gradients->judged_on_device() : gradients->may_be_judged_on_device()) return StepResult::left_to_device;
  const bool overflowed = judged ? gradients->overflowed() : gradients->found_inf().item<float>() != 0;
  return overflowed ? StepResult::skipped : StepResult::stepped;
}

GRADACCUM_INLINE void AmpScaler::note(StepResult result, PerOptimizer& state) {
  if (result == StepResult::skipped || result == StepResult::stepped) return hear(result == StepResult::skipped);
  if (result != StepResult::left_to_device) return;
  const auto found = state.gradients->found_inf();
  found.is_cpu() ? hear(found.item<float>() != 0) : found_.on_devices.push_back(found);
}

GRADACCUM_INLINE void AmpScaler::note_all() {
  for (auto& [optimizer, state] : optimizers_) note(state.result(), state);
}

GRADACCUM_INLINE const AmpScaler::Found& AmpScaler::found_on_host() {
  note_all();
  for (auto& found : std::exchange(found_.on_devices, {})) hear(found.item<float>() != 0);
  return found_;
}

GRADACCUM_INLINE bool AmpScaler::any_open() const {
  return std::any_of(optimizers_.begin(), optimizers_.end(), [](auto& state) { return state.second.open(); });
}

GRADACCUM_INLINE void AmpScaler::forget_closed(bool finite) {
  std::erase_if(optimizers_, [](auto& state) { return !state.second.open(); });
  found_ = {.finite = finite};
}

GRADACCUM_INLINE void AmpScaler::update(std::optional<double> new_scale) {
  if (!enabled_ || (!new_scale && update_on_device())) return;
  const auto found = new_scale ? Found() : found_on_host();
  if (!new_scale && !found.finite && !found.inf) return forget_closed();
  const bool clean = found.finite && !found.inf, waits = clean && any_open();
  auto next = current();
  const auto before = next.value;
  if (new_scale) next.set(*new_scale, "new_scale");
  if (found.inf) next.back_off();
  if (clean && !waits) next.count_clean_update();
  if (next.value != before)
    for (auto& [optimizer, state] : optimizers_)
      if (state.open()) state.accumulator->discard();
  change_to(next);
  forget_closed(waits);
}

GRADACCUM_INLINE bool AmpScaler::update_on_device() {
  if (!on_device_ || any_open()) return false;
  note_all();
  auto& found = found_.on_devices;
  if (!device_scale_ && found.empty()) return false;
  if (!device_scale_) device_scale_.emplace(scale_, found[0].device());
  const auto on_device = at::TensorOptions(at::kFloat).device(device_scale_->value().device());
  if (found_.inf || found_.finite) found.push_back(at::full({}, found_.inf, on_device));
  if (!found.empty()) {
    at::Tensor found_inf;
    for (auto& one : found) {
      const auto here = one.to(on_device.device(), /*non_blocking=*/true);
      found_inf = found_inf.defined() ? at::maximum(found_inf, here) : here;
    }
    on_devices_.clear();
    device_scale_->update(found_inf, scale_);
  }
  forget_closed();
  return true;
}

GRADACCUM_INLINE std::map<std::string, double> AmpScaler::state_dict() const {
  if (!enabled_) return {};
  const auto now = current();
  if (device_scale_) now.check_reached(now.value, 0);  // such a state could not be loaded
  return now.state_dict();
}

GRADACCUM_INLINE void AmpScaler::change_to(const detail::LossScale& next) {
  if (next.value != scale_.value || device_scale_) on_devices_.clear();
  device_scale_.reset();
  scale_ = next;
}

GRADACCUM_INLINE std::function<void()> AmpScaler::load(const std::map<std::string, double>& state) {
  if (!enabled_) return [] {};
  TORCH_CHECK(!any_open(),
              "AmpScaler: load_state_dict() needs all windows closed, whose sums have the old scale; call flush() or "
              "discard() of the accumulators first");
  auto next = scale_;
  next.load_state_dict(state);
  return [this, next] {
    change_to(next);
    forget_closed();
  };
}

GRADACCUM_INLINE void AmpScaler::state(Archive& archive) {
  auto entries = state_dict();
  for (auto& [key, value] : entries) archive(key, value);
  if (archive.loading()) archive.when_all_fit(load(entries));
}

/// Keeps one tensor for each device: backward saves it, so nothing may write to it meanwhile. A 0-dim float32 tensor
/// makes a 0-dim float16 loss float32; a number would not.
GRADACCUM_INLINE const at::Tensor& AmpScaler::scale_on(at::Device device) {
  auto& scale = on_devices_[device];
  if (!scale.defined()) {
    c10::InferenceMode usable_in_backward(false);
    scale = device_scale_ ? device_scale_->value().to(device, /*non_blocking=*/!device.is_cpu())
                          : at::full({}, scale_.value, at::TensorOptions(at::kFloat).device(device));
  }
  return scale;
}

}  // namespace gradaccum
