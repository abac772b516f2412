// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/scaling/loss_scale.hpp>

#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include <gradaccum/impl/begin.ipp>

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
  if (!enabled_)
    return accumulator ? accumulator->step() : step_optimizer(optimizer, Gradients(optimizer.parameters()));
  auto& state = state_of(optimizer);
  TORCH_CHECK(state.stage != Stage::stepped,
              "AmpScaler: step() has already been called on this optimizer since the last update()");
  join(state, optimizer, accumulator);
  if (!accumulator) state.stage = Stage::stepped;  // even if it throws: gradients may be multiplied already
  const auto result = accumulator ? accumulator->step() : step_optimizer(optimizer, *state.gradients);
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
  std::shared_ptr<detail::WindowGradients> one_batch;
  if (!accumulator) one_batch = std::make_shared<detail::WindowGradients>(parameters);
  Gradients gradients = accumulator ? accumulator->gradients() : Gradients(one_batch);
  unscale(gradients.factor());
  state.stage = Stage::ready;
  state.gradients = std::move(gradients);
  state.accumulator = accumulator;
  state.one_batch = std::move(one_batch);
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
  if (result == StepResult::skipped || result == StepResult::stepped)
    return record_overflow(result == StepResult::skipped);
  if (result != StepResult::left_to_device) return;
  const auto found = state.gradients->found_inf();
  found.is_cpu() ? record_overflow(found.item<float>() != 0) : found_.on_devices.push_back(found);
}

GRADACCUM_INLINE void AmpScaler::note_all() {
  for (auto& [optimizer, state] : optimizers_) note(state.result(), state);
}

GRADACCUM_INLINE const AmpScaler::Found& AmpScaler::found_on_host() {
  note_all();
  for (auto& found : std::exchange(found_.on_devices, {})) record_overflow(found.item<float>() != 0);
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

GRADACCUM_INLINE bool is_bf16_fast([[maybe_unused]] at::Device device) {
#if defined(__x86_64__)
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return !device.is_cpu() || has_avx512;
#else
  return true;
#endif
}

GRADACCUM_INLINE Autocast::Autocast(at::Device device, std::optional<at::ScalarType> dtype, bool enabled,
                                    std::optional<bool> cache_enabled)
    : device_(checked(device)), before_(state()) {
  const State within{enabled, dtype.value_or(before_.dtype), cache_enabled.value_or(before_.cache_enabled)};
  TORCH_CHECK(!enabled || within.dtype == at::kBFloat16 || within.dtype == at::kHalf,
              "Autocast: dtype must be bfloat16 or float16, got ", within.dtype,
              "; for a part that runs in float32 pass enabled = false");
  at::autocast::increment_nesting();
  change_to(within);
}

GRADACCUM_INLINE Autocast::~Autocast() {
  change_to(before_);
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

GRADACCUM_INLINE at::DeviceType Autocast::checked(at::Device device) {
  TORCH_CHECK(at::autocast::is_autocast_available(device.type()),
              "Autocast: the device must be one that has autocast, such as cuda and cpu, got ", device.type());
  return device.type();
}

GRADACCUM_INLINE Autocast::State Autocast::state() const {
  return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
          at::autocast::is_autocast_cache_enabled()};
}

/// Clears the cache if the dtype changes, as LibTorch looks up casts by parameter alone and would return the old dtype.
GRADACCUM_INLINE void Autocast::change_to(const State& next) const {
  if (next.dtype != at::autocast::get_autocast_dtype(device_)) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, next.enabled);
  at::autocast::set_autocast_dtype(device_, next.dtype);
  at::autocast::set_autocast_cache_enabled(next.cache_enabled);
}

}  // namespace gradaccum

namespace gradaccum::detail {

GRADACCUM_INLINE void LossScale::check() const {
  TORCH_CHECK(growth_factor > 1 && std::isfinite(growth_factor),
              "AmpScaler: growth_factor must be > 1 and finite, got ", growth_factor);
  TORCH_CHECK(backoff_factor > 0 && backoff_factor < 1, "AmpScaler: backoff_factor must be > 0 and < 1, got ",
              backoff_factor);
  TORCH_CHECK(growth_interval >= 1, "AmpScaler: growth_interval must be >= 1, got ", growth_interval);
  TORCH_CHECK(min_scale >= 0 && std::isfinite(min_scale), "AmpScaler: min_scale must be >= 0 and finite, got ",
              min_scale);
}

GRADACCUM_INLINE void LossScale::set(double scale, const char* name) {
  const auto rounded = static_cast<float>(scale);
  TORCH_CHECK(rounded > 0 && std::isfinite(rounded), "AmpScaler: ", name, " must be > 0 and finite in float32, got ",
              scale);
  TORCH_CHECK(scale >= min_scale, "AmpScaler: ", name, " must be >= min_scale (", min_scale, "), got ", scale);
  value = rounded;
}

GRADACCUM_INLINE void LossScale::back_off() {
  const auto next = static_cast<float>(value * backoff_factor);
  check_reached(next, 0);
  value = next;
  growth_tracker = 0;
}

GRADACCUM_INLINE void LossScale::check_reached(float scale, float smallest) const {
  TORCH_CHECK(scale > smallest && scale >= min_scale, "AmpScaler: the scale must stay ",
              min_scale > 0 ? c10::str(">= min_scale (", min_scale, ")") : "> 0", ", and overflows take it to ", scale,
              ": gradients overflow at every scale; look for inf or NaN in the data and the loss");
}

GRADACCUM_INLINE void LossScale::count_clean_update() {
  if (++growth_tracker < growth_interval) return;
  const auto next = static_cast<float>(value * growth_factor);
  if (std::isfinite(next)) value = next;
  growth_tracker = 0;
}

GRADACCUM_INLINE std::map<std::string, double> LossScale::state_dict() const {
  return {{"scale", value},
          {"growth_factor", growth_factor},
          {"backoff_factor", backoff_factor},
          {"growth_interval", static_cast<double>(growth_interval)},
          {"_growth_tracker", static_cast<double>(growth_tracker)}};
}

GRADACCUM_INLINE void LossScale::load_state_dict(const std::map<std::string, double>& state) {
  TORCH_CHECK(!state.empty(), "AmpScaler: the state must not be empty; it was saved by a scaler that was disabled");
  const auto entry = [&](const char* key) {
    const auto found = state.find(key);
    TORCH_CHECK(found != state.end(), "AmpScaler: the state must have the entry '", key, "', and has none");
    return found->second;
  };
  const auto count = [&](const char* key) {
    const double number = entry(key);
    TORCH_CHECK(number >= 0 && number <= 0x1p53 && number == std::floor(number), "AmpScaler: ", key,
                " must be a whole number >= 0, got ", number);
    return static_cast<std::int64_t>(number);
  };
  set(entry("scale"), "scale");
  growth_factor = entry("growth_factor");
  backoff_factor = entry("backoff_factor");
  growth_interval = count("growth_interval");
  growth_tracker = count("_growth_tracker");
  check();
}

GRADACCUM_INLINE void AsyncNumber::ask(const at::Tensor& number) {
  if (copied_) return;
  const auto device = number.device();
  if (!on_host_.defined()) on_host_ = at::empty({}, at::TensorOptions(at::kFloat).pinned_memory(device.is_cuda()));
  on_host_.copy_(number, /*non_blocking=*/true);
  copied_.emplace(device.type());
  copied_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

GRADACCUM_INLINE std::optional<float> AsyncNumber::answer() {
  if (!copied_ || !copied_->query()) return {};
  copied_.reset();
  return *on_host_.const_data_ptr<float>();
}

/// The smallest scale: numbers below lose digits, and a division by them may give inf.
inline constexpr float smallest_on_device = std::numeric_limits<float>::min();

/// The largest count, since the kernel counts in 32 bits.
inline constexpr std::int64_t most_counted = std::numeric_limits<std::int32_t>::max() - 1;

GRADACCUM_INLINE at::Tensor DeviceScale::growth_tracker_in(const at::Tensor& state) {
  return state.view(at::kInt).select(0, 3);
}

GRADACCUM_INLINE DeviceScale::DeviceScale(const LossScale& scale, at::Device device) {
  c10::InferenceMode usable_in_backward(false);
  at::NoGradGuard no_grad;
  set_state(memory_.take(2, device));
  value_.fill_(scale.value);
  wide_.fill_(scale.value);
  growth_tracker_in(state_).fill_(std::min(scale.growth_tracker, most_counted));
}

GRADACCUM_INLINE void DeviceScale::set_state(at::Tensor state) {
  static_assert(sizeof(ScaleState) == 2 * sizeof(double) && offsetof(ScaleState, value) == 2 * sizeof(float) &&
                offsetof(ScaleState, growth_tracker) == 3 * sizeof(float));
  state_ = std::move(state);
  value_ = state_.view(at::kFloat).select(0, 2);
  wide_ = state_.select(0, 0);
}

/// Updates the scale by LibTorch's operations.
GRADACCUM_INLINE void update_by_aten(const at::Tensor& value, const at::Tensor& wide, const at::Tensor& growth_tracker,
                                     const at::Tensor& found_inf, const LossScale& by) {
  growth_tracker.clamp_max_(by.growth_interval - 1);  // else it would never be due
  auto scale = value, tracker = growth_tracker;
  at::_amp_update_scale_(scale, tracker, found_inf, by.growth_factor, by.backoff_factor, by.growth_interval);
  scale.clamp_min_(smallest_on_device);
  wide.copy_(scale);
}

GRADACCUM_INLINE void DeviceScale::update(const at::Tensor& found_inf, LossScale by) {
  c10::InferenceMode usable_in_backward(false);
  at::NoGradGuard no_grad;
  if (const auto seen = heard_.answer()) by.check_reached(*seen, smallest_on_device);
  by.growth_interval = std::min(by.growth_interval, most_counted + 1);
  std::swap(memory_, before_);
  const auto next = memory_.take(2, state_.device()), last = state_;
  if (const auto* const kernels = device_kernels(); kernels && next.is_cuda()) {
    const c10::DeviceGuard guard(next.device());
    kernels->update_scale({found_inf.const_data_ptr<float>(), static_cast<const ScaleState*>(last.const_data_ptr()),
                           static_cast<ScaleState*>(next.mutable_data_ptr()), by.growth_factor, by.backoff_factor,
                           by.growth_interval, smallest_on_device},
                          native_stream(next.device()));
    set_state(next);
  } else {
    next.copy_(last);
    set_state(next);
    update_by_aten(value_, wide_, growth_tracker_in(state_), found_inf, by);
  }
  heard_.ask(value_);
}

GRADACCUM_INLINE LossScale DeviceScale::read(LossScale by) const {
  by.value = value_.item<float>();
  by.growth_tracker = growth_tracker_in(state_).item<int>();
  return by;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
