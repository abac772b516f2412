// SPDX-License-Identifier: Apache-2.0
// Implements the loss scale: multiplies losses, finds overflow, backs off and grows.
#pragma once

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/grad_accumulator.hpp>

#include <gradaccum/detail/platform/platform.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Updates the loss scale on the host, in float32, with the same bits as PyTorch's device kernels.
struct LossScale {
  double growth_factor = 2, backoff_factor = 0.5, min_scale = 0;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;  ///< updates since the last overflow, or since growth was last due
  float value = 1;

  void check() const {
    TORCH_CHECK(growth_factor > 1 && detail::is_finite(growth_factor),
                "AmpScaler: growth_factor must be > 1 and finite, got ", growth_factor);
    TORCH_CHECK(backoff_factor > 0 && backoff_factor < 1, "AmpScaler: backoff_factor must be > 0 and < 1, got ",
                backoff_factor);
    TORCH_CHECK(growth_interval >= 1, "AmpScaler: growth_interval must be >= 1, got ", growth_interval);
    TORCH_CHECK(min_scale >= 0 && detail::is_finite(min_scale), "AmpScaler: min_scale must be >= 0 and finite, got ",
                min_scale);
  }

  /// `name`: the user's name for `scale`.
  void set(double scale, const char* name) {
    const auto rounded = static_cast<float>(scale);
    TORCH_CHECK(rounded > 0 && detail::is_finite(rounded), "AmpScaler: ", name,
                " must be > 0 and finite in float32, got ", scale);
    TORCH_CHECK(scale >= min_scale, "AmpScaler: ", name, " must be >= min_scale (", min_scale, "), got ", scale);
    value = rounded;
  }

  /// Throws if overflows have taken the scale below `min_scale`, or to `smallest`.
  void check_reached(float scale, float smallest) const {
    TORCH_CHECK(scale > smallest && scale >= min_scale, "AmpScaler: the scale must stay ",
                min_scale > 0 ? c10::str(">= min_scale (", min_scale, ")") : "> 0", ", but overflows reduced it to ",
                scale, ": gradients overflow at every scale; check the data and the loss for inf or NaN");
  }

  void back_off() {
    const auto next = static_cast<float>(value * backoff_factor);
    check_reached(next, 0);
    value = next;
    growth_tracker = 0;
  }

  void count_clean_update() {
    if (++growth_tracker < growth_interval) return;
    const auto next = static_cast<float>(value * growth_factor);
    if (detail::is_finite(next)) value = next;
    growth_tracker = 0;
  }

  std::map<std::string, double> state_dict() const {
    return {{"scale", value},
            {"growth_factor", growth_factor},
            {"backoff_factor", backoff_factor},
            {"growth_interval", static_cast<double>(growth_interval)},
            {"_growth_tracker", static_cast<double>(growth_tracker)}};
  }

  /// Loads the entries. An exception leaves `*this` half-changed: load into a copy.
  void load_state_dict(const std::map<std::string, double>& state) {
    TORCH_CHECK(!state.empty(), "AmpScaler: the state must not be empty; it was saved by a scaler that was disabled");
    const auto entry = [&](const char* key) {
      const auto found = state.find(key);
      TORCH_CHECK(found != state.end(), "AmpScaler: the state must have the entry '", key, "', but does not");
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
};

/// Copies a device number to the host without waiting. It is read after it has arrived.
class AsyncNumber {
 public:
  /// Begins to copy a 0-dim float32 tensor. Does nothing while a copy is in flight.
  void ask(const at::Tensor& number) {
    if (copied_) return;
    const auto device = number.device();
    if (!on_host_.defined()) on_host_ = at::empty({}, at::TensorOptions(at::kFloat).pinned_memory(device.is_cuda()));
    on_host_.copy_(number, /*non_blocking=*/true);
    copied_.emplace(device.type());
    copied_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  /// Returns the number once, if it has arrived.
  std::optional<float> answer() {
    if (!copied_ || !copied_->query()) return {};
    copied_.reset();
    return *on_host_.const_data_ptr<float>();
  }

 private:
  at::Tensor on_host_;
  std::optional<c10::Event> copied_;
};

/// Keeps a loss scale on a device, and updates it there as `LossScale` does.
class DeviceScale {
 public:
  DeviceScale(const LossScale& scale, at::Device device) {
    c10::InferenceMode usable_in_backward(false);
    at::NoGradGuard no_grad;
    set_state(memory_.take(2, device));
    value_.fill_(scale.value);
    wide_.fill_(scale.value);
    growth_tracker().fill_(std::min(scale.growth_tracker, most_counted));
  }

  /// Returns the scale as 0-dim float32 or float64 tensors. They are not written to while other code, such as backward,
  /// holds them.
  const at::Tensor& value() const { return value_; }
  const at::Tensor& wide() const { return wide_; }

  /// Updates the scale. `found_inf`: 0-dim float32, 1 after an overflow. Throws if the scale has left its range, but
  /// some updates later, since the host does not wait for the device.
  void update(const at::Tensor& found_inf, LossScale by) {
    c10::InferenceMode usable_in_backward(false);
    at::NoGradGuard no_grad;
    if (const auto seen = copy_of_value_.answer()) by.check_reached(*seen, smallest);
    by.growth_interval = std::min(by.growth_interval, most_counted + 1);
    std::swap(memory_, before_);
    const auto next = memory_.take(2, state_.device()), last = state_;
    if (const auto* const kernels = device_kernels(); kernels && next.is_cuda()) {
      const c10::DeviceGuard guard(next.device());
      kernels->update_scale({found_inf.const_data_ptr<float>(), static_cast<const ScaleState*>(last.const_data_ptr()),
                             static_cast<ScaleState*>(next.mutable_data_ptr()), by.growth_factor, by.backoff_factor,
                             by.growth_interval, smallest},
                            native_stream(next.device()));
      set_state(next);
    } else {
      next.copy_(last);
      set_state(next);
      auto tracker = growth_tracker();
      tracker.clamp_max_(by.growth_interval - 1);  // otherwise growth would never be due
      at::_amp_update_scale_(value_, tracker, found_inf, by.growth_factor, by.backoff_factor, by.growth_interval);
      value_.clamp_min_(smallest);
      wide_.copy_(value_);
    }
    copy_of_value_.ask(value_);
  }

  /// Returns `by` with the device's value and count, and waits for the device.
  LossScale read(LossScale by) const {
    by.value = value_.item<float>();
    by.growth_tracker = growth_tracker().item<int>();
    return by;
  }

 private:
  /// The smallest scale: numbers below lose digits, and a division by them may give inf.
  static constexpr float smallest = std::numeric_limits<float>::min();
  /// The largest count, since the kernel counts in 32 bits.
  static constexpr std::int64_t most_counted = std::numeric_limits<std::int32_t>::max() - 1;

  void set_state(at::Tensor state) {
    static_assert(sizeof(ScaleState) == 2 * sizeof(double) && offsetof(ScaleState, value) == 2 * sizeof(float) &&
                  offsetof(ScaleState, growth_tracker) == 3 * sizeof(float));
    state_ = std::move(state);
    value_ = state_.view(at::kFloat).select(0, 2);
    wide_ = state_.select(0, 0);
  }
  at::Tensor growth_tracker() const { return state_.view(at::kInt).select(0, 3); }

  StreamMemory memory_, before_;  // of this and of the last state
  at::Tensor state_;              // float64 [2], see ScaleState
  at::Tensor value_, wide_;       // views of the state
  AsyncNumber copy_of_value_;
};

/// Throws for an accumulator or LBFGS behind a reference, where the type does not show it at compile time.
GRADACCUM_INLINE void check_nothing_hides(const AnyOptimizer& optimizer) {
  for (auto& [name, behind] : optimizer.members) {
    TORCH_CHECK(!is_accumulator(behind),
                "AmpScaler: an accumulator must not be passed as a torch::optim::Optimizer&, which hides its window; "
                "pass the accumulator itself");
    TORCH_CHECK(type_name(behind.defaults()) != "LBFGSOptions",  // finds classes derived from it, too
                "AmpScaler: must not be given LBFGS, which calls its closure several times a step, each with gradients "
                "of its own; use SGD, Adam, AdamW, RMSprop, Adagrad or one of your own");
  }
}

GRADACCUM_INLINE void check_none_is_half(const std::vector<at::Tensor>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    const auto dtype = gradient.defined() ? gradient.scalar_type() : parameters[i].scalar_type();
    TORCH_CHECK(!parameters[i].requires_grad() || at::toRealValueType(dtype) != at::kHalf,
                "AmpScaler: parameters and gradients must not be float16, got parameter ", i, " (shape ",
                parameters[i].sizes(), "); keep parameters in float32 and run forward inside an Autocast");
  }
}

}  // namespace detail

struct AmpScaler::State {
  enum class Stage { ready, unscaled, stepped };

  /// Python's `_per_optimizer_states`: an optimizer's stage, and its window, scaled until it is unscaled or closed.
  struct PerOptimizer {
    Stage stage = Stage::ready;
    std::optional<Gradients> gradients = {};  // none: not joined yet
    Accumulator* accumulator = nullptr;       // owner of the window, if it spans batches

    bool closed() const { return !gradients || gradients->closed(); }
    bool open() const { return accumulator && !closed(); }

    /// Returns the result of a window that was closed outside of `step`, for example by `flush()`, or was only
    /// unscaled. A window counts only if it was unscaled, or about to be stepped.
    StepResult result() {
      const bool judged = gradients && gradients->closed() && gradients->judged();
      if (stage == Stage::stepped || (!judged && stage != Stage::unscaled)) return StepResult::empty;
      if (judged ? gradients->judged_on_device() : gradients->may_be_judged_on_device())
        return StepResult::left_to_device;
      const bool overflowed = judged ? gradients->overflowed() : gradients->found_inf().item<float>() != 0;
      if (overflowed) return StepResult::skipped;
      return gradients->rejected() ? StepResult::rejected : StepResult::stepped;
    }
  };
  /// Results of overflow checks since the last update.
  struct Found {
    bool finite = false, inf = false;
    std::vector<at::Tensor> on_devices = {};  // 0-dim float32, 1 after an overflow
  };

  void record_overflow(bool overflowed) { (overflowed ? found.inf : found.finite) = true; }

  void record(StepResult result, PerOptimizer& of) {
    if (result == StepResult::skipped || result == StepResult::stepped)
      return record_overflow(result == StepResult::skipped);
    if (result != StepResult::left_to_device) return;
    const auto found_inf = of.gradients->found_inf();
    found_inf.is_cpu() ? record_overflow(found_inf.item<float>() != 0) : found.on_devices.push_back(found_inf);
  }

  void record_all() {
    for (auto& [address, one] : optimizers) record(one.result(), one);
  }

  /// Records the result of a window that was flushed or discarded outside the scaler, and replaces its state.
  PerOptimizer& state_of(const detail::AnyOptimizer& optimizer) {
    auto& one = optimizers[optimizer.address];
    if (!one.closed() || one.stage == Stage::stepped) return one;
    record(one.result(), one);
    return one = {};
  }

  void unscale(Factor& factor) const {
    if (!enabled) return;
    device_scale ? factor.divide_by_own(device_scale->wide()) : factor.divide(scale.value);
    on_device ? factor.require_finite_on_device() : factor.require_finite();
  }

  /// Makes the window divide by the scale and look for overflow when it is closed.
  void join(PerOptimizer& one, const detail::AnyOptimizer& optimizer, Accumulator* accumulator) {
    if (!one.closed()) return;  // already joined
    const auto parameters = optimizer.parameters();
    detail::check_none_is_half(parameters);
    Gradients gradients = accumulator ? accumulator->gradients() : Gradients(parameters);
    unscale(gradients.factor());
    one = {.gradients = std::move(gradients), .accumulator = accumulator};
  }

  bool any_open() const {
    return std::any_of(optimizers.begin(), optimizers.end(), [](auto& one) { return one.second.open(); });
  }

  /// Forgets the windows that are not open. `finite`: counts the others as finite at the next update.
  void forget_closed(bool finite = false) {
    std::erase_if(optimizers, [](auto& one) { return !one.second.open(); });
    found = {.finite = finite};
  }

  /// Reads the scale from the device if it is kept there.
  detail::LossScale current() const { return device_scale ? device_scale->read(scale) : scale; }

  void change_to(const detail::LossScale& next) {
    if (next.value != scale.value || device_scale) on_devices.clear();
    device_scale.reset();
    scale = next;
  }

  template <class Value>
  void set(Value detail::LossScale::*member, Value value) {
    auto next = scale;
    next.*member = value;
    next.check();
    scale = next;
  }

  /// Updates the scale on the device; false if that is not possible.
  bool update_on_device() {
    if (!on_device || any_open()) return false;
    record_all();
    auto& findings = found.on_devices;
    if (!device_scale && findings.empty()) return false;
    if (!device_scale) device_scale.emplace(scale, findings[0].device());
    const auto options = at::TensorOptions(at::kFloat).device(device_scale->value().device());
    if (found.inf || found.finite) findings.push_back(at::full({}, found.inf, options));
    if (!findings.empty()) {
      at::Tensor found_inf;
      for (auto& one : findings) {
        const auto here = one.to(options.device(), /*non_blocking=*/true);
        found_inf = found_inf.defined() ? at::maximum(found_inf, here) : here;
      }
      on_devices.clear();
      device_scale->update(found_inf, scale);
    }
    forget_closed();
    return true;
  }

  /// Checks the entries. The returned function loads them.
  std::function<void()> load(const std::map<std::string, double>& entries) {
    if (!enabled) return [] {};
    TORCH_CHECK(!any_open(),
                "AmpScaler: load_state_dict() must not be called inside a window, whose sums have the old scale; call "
                "flush() or discard() of the accumulators first");
    auto next = scale;
    next.load_state_dict(entries);
    return [this, next] {
      change_to(next);
      forget_closed();
    };
  }

  /// Keeps one tensor for each device: backward saves it, so nothing may write to it until then. A 0-dim float32 tensor
  /// makes a 0-dim float16 loss float32; a number would not.
  const at::Tensor& scale_on(at::Device device) {
    auto& tensor = on_devices[device];
    if (!tensor.defined()) {
      c10::InferenceMode usable_in_backward(false);
      tensor = device_scale ? device_scale->value().to(device, /*non_blocking=*/!device.is_cpu())
                            : at::full({}, scale.value, at::TensorOptions(at::kFloat).device(device));
    }
    return tensor;
  }

  detail::LossScale scale;  // the device has the current value and count, if it keeps the scale
  bool enabled = true, on_device = false;
  std::optional<detail::DeviceScale> device_scale = {};
  std::unordered_map<at::Device, at::Tensor> on_devices = {};
  std::map<const void*, PerOptimizer> optimizers = {};  // joined since the scale could last change
  Found found = {};
};

GRADACCUM_INLINE AmpScaler::AmpScaler(AmpScalerOptions options) : state_(std::make_unique<State>()) {
  state_->scale = {.growth_factor = options.growth_factor,
                   .backoff_factor = options.backoff_factor,
                   .min_scale = options.min_scale,
                   .growth_interval = options.growth_interval};
  state_->enabled = options.enabled;
  state_->on_device = options.on_device;
  state_->scale.check();
  state_->scale.set(options.init_scale, "init_scale");
}

GRADACCUM_INLINE AmpScaler::~AmpScaler() = default;

GRADACCUM_INLINE at::Tensor AmpScaler::scale(const at::Tensor& loss) {
  TORCH_CHECK(loss.defined(), "AmpScaler: the loss must be defined, got an undefined tensor");
  return state_->enabled ? loss.mul(state_->scale_on(loss.device())) : loss;
}

GRADACCUM_INLINE std::vector<at::Tensor> AmpScaler::scale(std::vector<at::Tensor> losses) {
  for (auto& loss : losses) loss = scale(loss);
  return losses;
}

GRADACCUM_INLINE Loss AmpScaler::scale(Loss loss) {
  if (!state_->enabled) return loss;
  loss.check();
  state_->device_scale ? loss.seed.multiply(state_->scale_on(loss.mean.device()))
                       : loss.seed.multiply(state_->scale.value);
  loss.seed.require_finite();
  return loss;
}

GRADACCUM_INLINE void AmpScaler::unscale(Factor& factor) const { state_->unscale(factor); }
GRADACCUM_INLINE void AmpScaler::record_overflow(bool overflowed) { state_->record_overflow(overflowed); }
GRADACCUM_INLINE double AmpScaler::get_scale() const { return state_->enabled ? state_->current().value : 1.0; }
GRADACCUM_INLINE double AmpScaler::get_growth_factor() const { return state_->scale.growth_factor; }
GRADACCUM_INLINE double AmpScaler::get_backoff_factor() const { return state_->scale.backoff_factor; }
GRADACCUM_INLINE std::int64_t AmpScaler::get_growth_interval() const { return state_->scale.growth_interval; }
GRADACCUM_INLINE bool AmpScaler::is_enabled() const { return state_->enabled; }

GRADACCUM_INLINE void AmpScaler::set_growth_factor(double new_factor) {
  state_->set(&detail::LossScale::growth_factor, new_factor);
}

GRADACCUM_INLINE void AmpScaler::set_backoff_factor(double new_factor) {
  state_->set(&detail::LossScale::backoff_factor, new_factor);
}

GRADACCUM_INLINE void AmpScaler::set_growth_interval(std::int64_t new_interval) {
  state_->set(&detail::LossScale::growth_interval, new_interval);
}

GRADACCUM_INLINE void AmpScaler::unscale_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator) {
  detail::check_nothing_hides(optimizer);
  if (!state_->enabled) return;
  auto& one = state_->state_of(optimizer);
  TORCH_CHECK(one.stage != State::Stage::unscaled,
              "AmpScaler: unscale_() has already been called on this optimizer since the last update()");
  TORCH_CHECK(one.stage != State::Stage::stepped, "AmpScaler: unscale_() was called after step(); call update() first");
  TORCH_CHECK(!accumulator || accumulator->ready(),
              "AmpScaler: unscale_() inside a window would mix unscaled sums with scaled ones to come; put it "
              "inside `if (optimizer.ready())`, after backward");
  state_->join(one, optimizer, accumulator);
  if (accumulator) accumulator->gradients();  // counts a plain backward that has run
  one.gradients->apply();
  if (!one.gradients->raw().empty()) one.stage = State::Stage::unscaled;
}

GRADACCUM_INLINE StepResult AmpScaler::step_window(detail::AnyOptimizer& optimizer, Accumulator* accumulator) {
  detail::check_nothing_hides(optimizer);
  if (!state_->enabled)
    return accumulator ? accumulator->step() : step_optimizer(optimizer, Gradients(optimizer.parameters()));
  auto& one = state_->state_of(optimizer);
  TORCH_CHECK(one.stage != State::Stage::stepped,
              "AmpScaler: step() has already been called on this optimizer since the last update()");
  state_->join(one, optimizer, accumulator);
  if (!accumulator) one.stage = State::Stage::stepped;  // even if it throws: gradients may be multiplied already
  const auto result = accumulator ? accumulator->step() : step_optimizer(optimizer, *one.gradients);
  if (result == StepResult::accumulated) return result;
  if (result == StepResult::empty && !accumulator) {
    TORCH_WARN_ONCE(
        "AmpScaler: step() found no gradient in the optimizer's parameters and changed nothing; call "
        "scaler.scale(loss).backward() first, and check that the optimizer has the model's parameters");
  }
  one.stage = State::Stage::stepped;
  if (!accumulator) one.gradients->window_->close();
  state_->record(result, one);
  return result;
}

GRADACCUM_INLINE void AmpScaler::update(std::optional<double> new_scale) {
  auto& all = *state_;
  if (!all.enabled || (!new_scale && all.update_on_device())) return;
  if (!new_scale) {
    all.record_all();
    for (auto& found_inf : std::exchange(all.found.on_devices, {})) all.record_overflow(found_inf.item<float>() != 0);
    if (!all.found.finite && !all.found.inf) return all.forget_closed();
  }
  const auto found = new_scale ? State::Found() : all.found;
  const bool clean = found.finite && !found.inf, waits = clean && all.any_open();
  auto next = all.current();
  const auto before = next.value;
  if (new_scale) next.set(*new_scale, "new_scale");
  if (found.inf) next.back_off();
  if (clean && !waits) next.count_clean_update();
  if (next.value != before)
    for (auto& [address, one] : all.optimizers)
      if (one.open()) one.accumulator->discard();
  all.change_to(next);
  all.forget_closed(waits);
}

GRADACCUM_INLINE std::map<std::string, double> AmpScaler::state_dict() const {
  if (!state_->enabled) return {};
  const auto now = state_->current();
  if (state_->device_scale) now.check_reached(now.value, 0);  // load would reject such a state
  return now.state_dict();
}

GRADACCUM_INLINE void AmpScaler::load_state_dict(const std::map<std::string, double>& state) { state_->load(state)(); }

GRADACCUM_INLINE void AmpScaler::state(Archive& archive) {
  auto entries = state_dict();
  for (auto& [key, value] : entries) archive(key, value);
  if (archive.loading()) archive.when_all_fit(state_->load(entries));
}

GRADACCUM_INLINE bool is_bf16_fast([[maybe_unused]] at::Device device) {
#if defined(__x86_64__)
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return !device.is_cpu() || has_avx512;
#else
  return !device.is_cpu() || detail::arm_features().bf16;
#endif
}

GRADACCUM_INLINE Autocast::Autocast(at::Device device, std::optional<at::ScalarType> dtype, bool enabled,
                                    std::optional<bool> cache_enabled)
    : device_(device.type()) {
  TORCH_CHECK(at::autocast::is_autocast_available(device_),
              "Autocast: the device must support autocast, as cuda and cpu do, got ", device_);
  before_ = {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
             at::autocast::is_autocast_cache_enabled()};
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

/// Clears the cache if the dtype changes, as LibTorch looks up casts by parameter alone and would return the old dtype.
GRADACCUM_INLINE void Autocast::change_to(const State& next) const {
  if (next.dtype != at::autocast::get_autocast_dtype(device_)) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, next.enabled);
  at::autocast::set_autocast_dtype(device_, next.dtype);
  at::autocast::set_autocast_cache_enabled(next.cache_enabled);
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
