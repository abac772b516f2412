// SPDX-License-Identifier: Apache-2.0
// A window's gradients: their factors, norm, clipping and overflow.
#pragma once

#include <gradaccum/detail/window/window_gradients.hpp>
#include <gradaccum/gradients.hpp>

#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {
namespace detail {

/// Sorts the factors first: products of reciprocals, or in another order, differ in their last bits.
GRADACCUM_INLINE double sorted_product(std::vector<double> factors) {
  std::sort(factors.begin(), factors.end());
  return std::accumulate(factors.begin(), factors.end(), 1.0, std::multiplies<>());
}

/// Multiplies sorted device factors without waiting for the device; undefined if there are none.
GRADACCUM_INLINE at::Tensor sorted_product(const std::vector<at::Tensor>& factors) {
  if (factors.size() < 2) return factors.empty() ? at::Tensor() : factors.front();
  std::vector<at::Tensor> on_one_device;
  for (auto& factor : factors) on_one_device.push_back(factor.to(factors.front().device(), /*non_blocking=*/true));
  return std::get<0>(at::stack(on_one_device).sort()).prod();
}

/// Multiplies `factor` by the coefficient that clips gradients of this norm to `max_norm`.
GRADACCUM_INLINE void clip_by(Factor& factor, const at::Tensor& norm, double max_norm) {
  if (!detail::is_finite(max_norm)) return;  // inf / inf would be NaN
  if (!norm.device().is_cpu()) return factor.multiply(norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0));
  const double coefficient = 1 / (norm.item<double>() + 1e-6) * max_norm;
  factor.multiply(coefficient > 1 ? 1.0 : coefficient);  // NaN stays NaN
}

/// Copies a factor, since its owner may change the tensor before it is used.
GRADACCUM_INLINE at::Tensor copied_factor(const at::Tensor& by) {
  return by.detach().to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
}

}  // namespace detail

GRADACCUM_INLINE bool Factor::on_host(const at::Tensor& by) {
  TORCH_CHECK(by.defined() && by.dim() == 0, "Factor: must be a number or a 0-dim tensor, got ",
              by.defined() ? c10::str("shape ", by.sizes()) : "an undefined tensor");
  return by.device().is_cpu();
}

GRADACCUM_INLINE void Factor::multiply(const at::Tensor& by) {
  if (on_host(by)) return multiply(by.item<double>());
  device_multipliers_.push_back(detail::copied_factor(by));
}

GRADACCUM_INLINE void Factor::divide(double by) {
  TORCH_CHECK(by != 0, "Factor: a divisor must not be 0");
  divisors_.push_back(by);
}

GRADACCUM_INLINE void Factor::divide(const at::Tensor& by) {
  if (on_host(by)) return divide(by.item<double>());
  device_divisors_.push_back(detail::copied_factor(by));
}

GRADACCUM_INLINE detail::Multiplier product_of(const Factor& factor) {
  return {detail::sorted_product(factor.multipliers_), detail::sorted_product(factor.divisors_),
          detail::sorted_product(factor.device_multipliers_), detail::sorted_product(factor.device_divisors_)};
}

GRADACCUM_INLINE Factor requirement_of(const Factor& factor) {
  Factor bare;
  bare.finiteness_ = factor.finiteness_;
  return bare;
}

GRADACCUM_INLINE Gradients::Gradients(const std::vector<at::Tensor>& parameters)
    : window_(std::make_shared<detail::WindowGradients>(parameters)) {}

GRADACCUM_INLINE std::vector<at::Tensor> Gradients::values() {
  window_->apply();
  return window_->raw();
}

GRADACCUM_INLINE at::Tensor Gradients::multiplier(at::Device device) const { return window_->multiplier().on(device); }

GRADACCUM_INLINE void Gradients::set_norm_before_clipping(at::Tensor norm) {
  window_->set_norm_before_clipping(std::move(norm));
}

GRADACCUM_INLINE const at::Tensor& Gradients::norm_before_clipping() const { return window_->norm_before_clipping(); }
GRADACCUM_INLINE Factor& Gradients::factor() { return window_->factor(); }
GRADACCUM_INLINE double Gradients::items() const { return window_->items(); }
GRADACCUM_INLINE std::vector<at::Tensor> Gradients::parameters() const { return window_->parameters(); }
GRADACCUM_INLINE std::vector<at::Tensor> Gradients::raw() const { return window_->raw(); }
GRADACCUM_INLINE at::Tensor Gradients::norm() { return window_->norm(); }
GRADACCUM_INLINE at::Tensor Gradients::found_inf() { return window_->found_inf(); }
GRADACCUM_INLINE bool Gradients::finite_required() const { return window_->must_be_finite(); }
GRADACCUM_INLINE bool Gradients::overflowed() { return window_->overflowed(); }
GRADACCUM_INLINE bool Gradients::may_be_judged_on_device() const { return window_->may_be_judged_on_device(); }
GRADACCUM_INLINE at::Tensor Gradients::judge_on_device() { return window_->judge_on_device(); }
GRADACCUM_INLINE bool Gradients::judged() const { return window_->judged(); }
GRADACCUM_INLINE bool Gradients::judged_on_device() const { return window_->judged_on_device(); }
GRADACCUM_INLINE void Gradients::apply() { window_->apply(); }
GRADACCUM_INLINE bool Gradients::closed() const { return window_->closed(); }
GRADACCUM_INLINE detail::Multiplier product_of(const Gradients& gradients) { return gradients.window_->multiplier(); }

GRADACCUM_INLINE Loss Loss::with(at::Tensor output_of_model, at::Tensor wanted) const {
  auto loss = *this;
  loss.output = std::move(output_of_model);
  loss.target = std::move(wanted);
  return loss;
}

GRADACCUM_INLINE void Loss::check_shape() const {
  TORCH_CHECK(mean.defined() && mean.numel() == 1, "Loss: the mean must have one element, got ",
              mean.defined() ? c10::str("shape ", mean.sizes()) : "an undefined tensor");
}

GRADACCUM_INLINE void Loss::check() const {
  check_shape();
  TORCH_CHECK(items == 0 || mean.requires_grad(), "Loss: the mean must require grad for backward, but does not");
}

GRADACCUM_INLINE void Loss::backward(const BackwardOptions& options) const {
  check();
  const auto by = product_of(seed);
  const bool plain = !options.retain_graph.value_or(false) && !options.create_graph && options.inputs.empty();
  if (ready_ && plain && ready_(mean, by)) return;
  at::Tensor start;
  if (by.on_host() && !by.is_one()) start = at::full_like(mean, by.host());
  if (!by.on_host()) start = by.on(mean.device()).to(mean.scalar_type()).expand_as(mean);
  const auto inputs = options.inputs.empty() ? std::nullopt : std::optional<at::TensorList>(options.inputs);
  const auto run = [&] { mean.backward(start, options.retain_graph, options.create_graph, inputs); };
  const auto why = [] {
    return "Loss: a batch, a recurrent state or another loss shares a part of this graph, which backward has freed: "
           "detach() its tensors, or add the losses";
  };
  detail::explaining("graph a second time", why, run);
}

GRADACCUM_INLINE void Window::add(double weight) {
  check_weight(weight);
  TORCH_CHECK(detail::is_finite(total_weight_ + weight), "Loss: the items of a window must have a finite sum, got ",
              total_weight_, " + ", weight);
  ++count_;
  if (first_weight_ == 0) first_weight_ = weight;
  total_weight_ += weight;
}

GRADACCUM_INLINE void Window::check_weight(double weight) {
  TORCH_CHECK(detail::is_finite(weight) && weight >= 0, "Loss: items must be finite and >= 0, got ", weight);
}

GRADACCUM_INLINE void Window::set_steps(std::int64_t steps) {
  next_steps_ = checked(steps);
  if (count_ == 0) steps_ = steps;
}

GRADACCUM_INLINE void Window::resume(std::int64_t count, double first_weight, double total_weight) {
  check_weight(first_weight);
  check_weight(total_weight);
  TORCH_CHECK(count >= 0 && (count > 0 || total_weight == 0) && (first_weight > 0) == (total_weight > 0),
              "Window: a saved window must have a count >= 0 and items that fit it, got ", count, ", ", first_weight,
              " and ", total_weight);
  count_ = count, first_weight_ = first_weight, total_weight_ = total_weight;
}

GRADACCUM_INLINE std::int64_t Window::checked(std::int64_t steps) {
  TORCH_CHECK(steps >= 1, "GradAccumulator: steps must be >= 1, got ", steps);
  return steps;
}

GRADACCUM_INLINE at::Tensor clip_grad_norm_(Gradients gradients, double max_norm) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  return gradients.window_->clip(max_norm);
}

GRADACCUM_INLINE at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                            double norm_type, bool error_if_nonfinite) {
  TORCH_CHECK(max_norm > 0, "clip_grad_norm_: max_norm must be > 0, got ", max_norm);
  TORCH_CHECK(norm_type > 0, "clip_grad_norm_: norm_type must be > 0, got ", norm_type);
  at::NoGradGuard no_grad;
  Gradients gradients(parameters);
  at::Tensor norm;
  if (norm_type == 2.0) {
    norm = clip_grad_norm_(gradients, max_norm);
  } else {
    norm = detail::norms(gradients.raw(), norm_type).norm(norm_type);
    detail::clip_by(gradients.factor(), norm, max_norm);
  }
  TORCH_CHECK(!error_if_nonfinite || norm.isfinite().item<bool>(), "clip_grad_norm_: the norm must be finite, got ",
              norm.item<double>(), "; pass error_if_nonfinite = false to clip anyway");
  gradients.apply();
  return norm;
}

GRADACCUM_INLINE void clip_grad_value_(Gradients gradients, double clip_value) {
  TORCH_CHECK(clip_value >= 0, "clip_grad_value_: clip_value must be >= 0, got ", clip_value);
  at::NoGradGuard no_grad;
  for (const auto& gradient : gradients.values()) {
    if (!gradient.is_sparse()) {
      gradient.clamp_(-clip_value, clip_value);
    } else {  // the duplicates of a sparse gradient are summed first
      const auto summed = gradient.coalesce();
      summed._values().clamp_(-clip_value, clip_value);
      gradient.copy_(summed);
    }
  }
}

GRADACCUM_INLINE void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  clip_grad_value_(Gradients(parameters), clip_value);
}

}  // namespace gradaccum

namespace gradaccum::detail {

GRADACCUM_INLINE void WindowSums::set_parameters(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> known;
  std::vector<at::Tensor> distinct, apart;
  for (auto& parameter : parameters) {
    TORCH_CHECK(parameter.defined(), "Gradients: a parameter is an undefined tensor");
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    distinct.push_back(parameter);
    auto& sum = apart.emplace_back();
    for (std::size_t i = 0; i < size(); ++i)
      if (parameters_[i].is_same(parameter)) sum = apart_[i];
  }
  parameters_ = std::move(distinct);
  apart_ = std::move(apart);
}

GRADACCUM_INLINE void WindowSums::fold(std::size_t place, std::optional<at::ScalarType> dtype) {
  at::NoGradGuard no_grad;
  auto& gradient = parameters_[place].mutable_grad();
  auto& sum = apart_[place];
  const auto begins = [&] { return dtype && at::elementSize(gradient.scalar_type()) < at::elementSize(*dtype); };
  if (!gradient.defined() || (!sum.defined() && !begins())) return;
  if (!sum.defined())
    sum = gradient.detach().to(*dtype);
  else if (sum.is_sparse() && !gradient.is_sparse())  // ATen adds a sparse tensor to a dense one, not the reverse
    sum = gradient.detach().to(sum.scalar_type()).add_(sum);
  else
    sum.add_(gradient);
  gradient.reset();
}

GRADACCUM_INLINE void add_sum(WindowSums::Named& named, const std::string& slot, const std::string& name,
                              const at::Tensor& sum) {
  if (!sum.defined()) return;
  if (!sum.is_sparse()) {
    named.emplace(slot + "." + name, sum.detach());
    return;
  }
  const auto kind = sum.is_coalesced() ? ".coalesced." : ".sparse.";
  named.emplace(slot + ".indices." + name, sum._indices());
  named.emplace(slot + kind + name, sum._values().detach());
}

/// Copies a sum into the parameter's memory order, as backward leaves it: a norm adds up in that order.
GRADACCUM_INLINE at::Tensor dense_sum(const at::Tensor& parameter, const at::Tensor& saved, const std::string& name) {
  TORCH_CHECK(saved.sizes() == parameter.sizes() && saved.is_complex() == parameter.is_complex() &&
                  (saved.is_floating_point() || saved.is_complex()),
              "GradAccumulator: the state's gradient of ", name, " must have shape ", parameter.sizes(), ", got ",
              saved.sizes(), " (", saved.scalar_type(), ")");
  return at::empty_like(parameter, saved.scalar_type()).copy_(saved);
}

/// Takes a sum out of `named`, on its parameter's device; undefined if there is none.
GRADACCUM_INLINE at::Tensor extract_sum(WindowSums::Named& named, const std::string& slot, const std::string& name,
                                        const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  if (const auto dense = named.extract(slot + "." + name)) return dense_sum(parameter, dense.mapped(), name);
  const auto indices = named.extract(slot + ".indices." + name);
  if (!indices) return {};
  auto values = named.extract(slot + ".sparse." + name);
  const bool coalesced = !values;
  if (coalesced) values = named.extract(slot + ".coalesced." + name);
  TORCH_CHECK(values, "GradAccumulator: the state has the indices of a sparse gradient without its values: ", name);
  const auto dtype = values.mapped().scalar_type();
  TORCH_CHECK(indices.mapped().scalar_type() == at::kLong && (at::isFloatingType(dtype) || at::isComplexType(dtype)),
              "GradAccumulator: the state's sparse gradient of ", name, " must have int64 indices and floating values");
  const auto copied = [&](const at::Tensor& saved) {
    return saved.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);
  };
  return at::sparse_coo_tensor(copied(indices.mapped()), copied(values.mapped()), parameter.sizes(),
                               parameter.options().dtype(dtype).layout(at::kSparse))
      ._coalesced_(coalesced);
}

GRADACCUM_INLINE WindowSums::Named WindowSums::named(const NameOf& name_of) const {
  Named named;
  for (std::size_t i = 0; i < size(); ++i) {
    add_sum(named, "grad", name_of(parameters_[i]), parameters_[i].grad());
    add_sum(named, "sum", name_of(parameters_[i]), apart_[i]);
  }
  return named;
}

GRADACCUM_INLINE WindowSums::Loaded WindowSums::load(Named named, const NameOf& name_of, bool lenient) const {
  Loaded all;
  for (auto& parameter : parameters_) {
    at::Tensor gradient, sum;
    try {
      const auto& name = name_of(parameter);
      sum = extract_sum(named, "sum", name, parameter);
      gradient = extract_sum(named, "grad", name, parameter);
      TORCH_CHECK(!gradient.defined() || gradient.scalar_type() == parameter.scalar_type(),
                  "GradAccumulator: the state's gradient of ", name, " must be ", parameter.scalar_type(), ", got ",
                  gradient.scalar_type());
    } catch (const c10::Error&) {
      if (!lenient) throw;
      gradient.reset();
    }
    all.in_grad.push_back(gradient);
    all.apart.push_back(sum);
  }
  TORCH_CHECK(lenient || named.empty(), "GradAccumulator: the state has a gradient that no parameter here has: ",
              named.empty() ? "" : named.begin()->first);
  return all;
}

GRADACCUM_INLINE WindowSums::Loaded WindowSums::copies() const {
  const auto copied = [](const at::Tensor& sum) { return sum.defined() ? sum.detach().clone() : at::Tensor(); };
  Loaded copies;
  for (std::size_t i = 0; i < size(); ++i) {
    copies.in_grad.push_back(copied(parameters_[i].grad()));
    copies.apart.push_back(copied(apart_[i]));
  }
  return copies;
}

/// Returns true if squares of finite gradients may overflow, as in float64.
GRADACCUM_INLINE bool squares_may_overflow(const std::vector<at::Tensor>& gradients) {
  return std::ranges::any_of(gradients,
                             [](auto& gradient) { return at::toRealValueType(gradient.scalar_type()) == at::kDouble; });
}

GRADACCUM_INLINE at::Tensor found_inf(const std::vector<at::Tensor>& gradients, const at::Tensor& l2_norms) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto sizes = squares_may_overflow(gradients) ? norms(gradients, infinity) : l2_norms;
  if (!sizes.device().is_cpu()) return sizes.isfinite().all().logical_not().to(at::kFloat);
  const auto* const all = sizes.const_data_ptr<double>();
  const bool finite = std::all_of(all, all + sizes.numel(), [](double size) { return detail::is_finite(size); });
  return at::scalar_tensor(finite ? 0.0 : 1.0, at::TensorOptions(at::kFloat));
}

GRADACCUM_INLINE void WindowGradients::check_open() const {
  TORCH_CHECK(
      !stepped_,
      "Gradients: with in_backward, the gradients of this window were freed after its parameters were stepped; turn "
      "in_backward off for what needs all of them at once (clipping, a loss scaler, norm(), values(), apply())");
  TORCH_CHECK(!closed(), "Gradients: this window is closed (stepped, skipped or discarded); call gradients() again");
}

GRADACCUM_INLINE void WindowGradients::check_here() const {
  check_open();
  TORCH_CHECK(!elsewhere(),
              "Gradients: with Shard::gradients, no rank has the gradients of an open window; use them when it is "
              "complete, inside `if (optimizer.ready())`");
}

GRADACCUM_INLINE std::shared_ptr<WindowGradients> WindowGradients::part(const std::vector<std::size_t>& places) {
  auto part = std::make_shared<WindowGradients>(std::vector<at::Tensor>());
  part->sums_ = sums_.part(places);
  part->factor_ = factor_;
  part->set_weights(first_weight_, total_weight_);
  if (look_at_part_ && !places.empty()) look_at_part_(*part);
  return part;
}

GRADACCUM_INLINE void WindowGradients::divide(const Shards& shards, const std::vector<at::Tensor>& sums) {
  for (auto place : sums_.places()) sums_.forget(place);  // not sent: those of frozen parameters
  WindowSums own;
  own.set_parameters(shards.own());
  for (std::size_t place = 0; place < sums.size(); ++place)
    if (sums[place].defined()) own.set(place, sums[place]);
  sums_ = std::move(own);
  place_ = Place::divided;
  norms_.reset();  // measured before the division
}

GRADACCUM_INLINE WindowGradients::Measure WindowGradients::measure() {
  const at::NoGradGuard no_grad;
  const auto gradients = measured();
  found_inf_ = detail::found_inf(gradients, norms_);
  return {l2_norm_of(norms_).item<double>(), found_inf_.item<float>() == 0};
}

GRADACCUM_INLINE void WindowGradients::wait_for_measure() {
  if (!measure_of_all_) return;
  const auto measure = measure_of_all_();
  measure_of_all_ = nullptr;
  norms_ = at::full({1}, measure.norm, norms_.options());
  found_inf_ = at::full({}, measure.finite ? 0.0 : 1.0, found_inf_.options());
}

GRADACCUM_INLINE Multiplier WindowGradients::multiplier() const {
  auto factor = factor_;
  if (!applied() && total_weight_ > 0) {
    factor.multiply(first_weight_);  // the seeds were divided by it
    factor.divide(total_weight_);
  }
  return product_of(factor);
}

GRADACCUM_INLINE std::vector<at::Tensor> WindowGradients::measured() {
  auto gradients = raw();
  wait_for_measure();
  if (norms_.defined() && is_measured(gradients)) return gradients;
  TORCH_CHECK(!measured_of_all(),
              "Gradients: this rank has only a shard of the gradients, and it has changed since the norm of all shards "
              "was measured; get the norm, and whether they are finite, before you change them");
  norms_.reset();
  norms_ = norms(gradients, 2, &norm_memory_);
  found_inf_.reset();
  overflowed_.reset();
  judged_on_device_.reset();
  measured_ = std::vector<SeenTensor>(gradients.begin(), gradients.end());
  return gradients;
}

GRADACCUM_INLINE void WindowGradients::scale(const at::Tensor& norm, const Multiplier& by) const {
  if (by.on_host())
    norm.mul_(std::abs(by.host()));
  else
    norm.mul_(by.on(norm.device()).abs());
}

GRADACCUM_INLINE at::Tensor WindowGradients::window_norm(const std::vector<at::Tensor>& gradients, double max_norm) {
  const auto by = multiplier().moved_to(norms_.device());
  const auto result = window_norm_on_device(norms_, by.pointers(), max_norm);
  if (!found_inf_.defined() && !squares_may_overflow(gradients)) found_inf_ = found_inf_in(result);
  return result;
}

GRADACCUM_INLINE at::Tensor WindowGradients::norm() {
  if (closed() && !stepped_ && norm_.defined()) return norm_;
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (measured_by_kernel()) return norm_ = norm_in(window_norm(gradients, std::numeric_limits<double>::infinity()));
  norm_ = l2_norm_of(norms_);
  scale(norm_, multiplier());
  return norm_;
}

GRADACCUM_INLINE at::Tensor WindowGradients::clip(double max_norm) {
  at::NoGradGuard no_grad;
  check_open();
  const auto gradients = measured();
  if (measured_by_kernel() && detail::is_finite(max_norm)) {
    const auto result = window_norm(gradients, max_norm);
    norm_ = norm_in(result);
    factor_.multiply_by_own(clip_coefficient_in(result));
  } else {
    clip_by(factor_, norm(), max_norm);
  }
  return norm_before_clipping_ = norm_;
}

GRADACCUM_INLINE at::Tensor WindowGradients::found_inf() {
  if (verdict_.defined()) return verdict_;
  wait_for_measure();
  if (closed() && found_inf_.defined()) return found_inf_;
  at::NoGradGuard no_grad;
  const auto gradients = measured();
  if (found_inf_.defined()) return found_inf_;
  if (measured_by_kernel() && !squares_may_overflow(gradients))
    window_norm(gradients, std::numeric_limits<double>::infinity());
  if (!found_inf_.defined()) found_inf_ = detail::found_inf(gradients, norms_);
  return found_inf_;
}

GRADACCUM_INLINE bool WindowGradients::overflowed(at::Tensor* beside) {
  if (judged_on_device()) overflowed_ = judged_on_device_.item<float>() != 0;
  if (closed() || !must_be_finite()) return overflowed_.value_or(false);
  auto found = found_inf();  // forgets the last answer if a gradient has changed
  if (overflowed_) return *overflowed_;
  if (beside && beside->defined() && !found.is_cpu() && beside->device() == found.device()) {
    const auto both = at::stack({found.to(at::kDouble), *beside}).cpu();
    found = both[0], *beside = both[1];
  }
  overflowed_ = found.item<double>() != 0;
  return *overflowed_;
}

GRADACCUM_INLINE void WindowGradients::apply() {
  check_open();
  TORCH_CHECK(complete(),
              "Gradients: apply() and values() inside a window would mix multiplied sums with those to come; "
              "call them after backward, inside `if (optimizer.ready())`");
  at::NoGradGuard no_grad;
  if (must_be_finite()) verdict_ = found_inf();
  const auto by = multiplier();
  const bool known = measured_of_all() && is_measured(raw());
  if (!by.is_one()) multiply_(raw(), by);
  factor_ = requirement_of(factor_);
  state_ = State::applied;
  sums_.become_gradients();
  if (!known) return;
  wait_for_measure();
  scale(norms_, by);
  const auto gradients = raw();
  measured_ = std::vector<SeenTensor>(gradients.begin(), gradients.end());
}

/// Returns a gradient's numbers, duplicates in a sparse one apart, as a dense real tensor that shares its memory.
GRADACCUM_INLINE at::Tensor elements(const at::Tensor& gradient) {
  TORCH_CHECK(gradient.layout() == at::kStrided || gradient.is_sparse(),
              "Gradients: a gradient must be dense or sparse COO, got layout ", gradient.layout());
  auto values = gradient.is_sparse() ? gradient._values() : gradient;
  if (!values.is_complex()) return values;
  return at::view_as_real(values.is_conj() ? values.conj() : values);  // backward often leaves a lazy conjugate
}

/// Groups tensors that one foreach operation can take.
GRADACCUM_INLINE std::vector<std::vector<at::Tensor>> by_device_and_dtype(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> groups;
  for (auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const auto group = std::ranges::find_if(groups, [&](auto& of) {
      return of.front().device() == tensor.device() && of.front().scalar_type() == tensor.scalar_type();
    });
    (group == groups.end() ? groups.emplace_back() : *group).push_back(tensor);
  }
  return groups;
}

GRADACCUM_INLINE at::Tensor norms(const std::vector<at::Tensor>& gradients, double p, StreamMemory* memory) {
  std::vector<SquaredNumbers> on_cpu;  // duplicates in a sparse gradient count as their sum
  std::vector<at::Tensor> by_kernel, others, found;
  for (auto& gradient : gradients) {
    const auto summed = gradient.is_sparse() ? gradient.coalesce() : gradient;
    const auto numbers = elements(summed);
    if (numbers.numel() == 0) continue;
    if (p == 2 && can_be_summed_here(numbers)) {
      auto& squares = on_cpu.emplace_back(SquaredNumbers{numbers});
      if (summed.is_sparse() && summed.sparse_dim() == 1 && numbers.is_contiguous())  // in the order of a dense one's
        squares = {numbers, summed._indices()[0].contiguous(), summed.size(0)};
    } else if (p == 2 && can_be_normed_on_device(numbers)) {
      by_kernel.push_back(numbers);
    } else {
      others.push_back(numbers);
    }
  }
  for (auto& group : by_device_and_dtype(by_kernel)) {
    StreamMemory of_others;
    found.push_back(l2_norms_on_device(group, memory && found.empty() ? *memory : of_others));
  }
  for (auto& group : by_device_and_dtype(others))
    for (auto& norm : at::_foreach_norm(group, p, at::kDouble)) found.push_back(norm.reshape({1}));
  if (!on_cpu.empty()) {  // without the float64 copies that ATen would make
    auto roots = sums_of_squares(on_cpu);
    for (auto& root : roots) root = std::sqrt(root);
    found.push_back(at::tensor(roots, at::TensorOptions(at::kDouble)));
  }
  if (found.empty()) found.push_back(at::zeros({1}, at::TensorOptions(at::kDouble)));
  if (found.size() == 1) return found.front();
  auto device = found.front().device();  // a device if there is any, since a copy to it need not be waited for
  for (auto& norm : found)
    if (!norm.device().is_cpu()) device = norm.device();
  for (auto& norm : found) norm = norm.to(device, /*non_blocking=*/true);
  return at::cat(found);
}

// Reductions of a few numbers use no operations on the CPU: each would take as long as a pass over a small model.

GRADACCUM_INLINE at::Tensor l2_norm_of(const at::Tensor& norms) {
  if (!norms.device().is_cpu()) return norms.norm();
  const auto* const all = norms.const_data_ptr<double>();
  double largest = 0, sum = 0;  // scaled, so that no square overflows
  for (std::int64_t i = 0; i < norms.numel(); ++i) largest = all[i] <= largest ? largest : all[i];
  const double scale = largest > 0 && detail::is_finite(largest) ? largest : 1.0;
  for (std::int64_t i = 0; i < norms.numel(); ++i) sum += (all[i] / scale) * (all[i] / scale);
  return at::scalar_tensor(std::sqrt(sum) * scale, at::TensorOptions(at::kDouble));
}

/// Multiplies 16-bit gradients by a 0-dim float32 tensor on the CPU, or in float32 on a device: ATen first rounds a
/// Scalar, and a 0-dim tensor on CUDA, to 16 bits.
GRADACCUM_INLINE void multiply_(const std::vector<at::Tensor>& gradients, const Multiplier& by) {
  std::vector<at::Tensor> all;
  for (auto& gradient : gradients) all.push_back(elements(gradient));
  for (auto& group : by_device_and_dtype(all)) {
    const bool wide = group.front().element_size() > 2;
    if (wide && by.on_host()) {
      at::_foreach_mul_(group, by.host());
    } else if (wide) {
      at::_foreach_mul_(group, by.on(group.front().device()).to(group.front().scalar_type()));
    } else {
      const auto factor = by.on(by.on_host() ? at::Device(at::kCPU) : group.front().device()).to(at::kFloat);
      for (auto& tensor : group) by.on_host() ? tensor.mul_(factor) : tensor.copy_(tensor.to(at::kFloat).mul_(factor));
    }
  }
}

GRADACCUM_INLINE at::Tensor Multiplier::on(at::Device device) const {
  const auto number = [&](double value) { return at::full({}, value, at::TensorOptions(at::kDouble).device(device)); };
  auto product = number(device_denominator.defined() ? numerator : host());
  if (device_numerator.defined()) product.mul_(device_numerator.to(device));
  if (device_denominator.defined()) product.div_(number(denominator).mul_(device_denominator.to(device)));
  return product;
}

GRADACCUM_INLINE Multiplier Multiplier::moved_to(at::Device device) const {
  auto moved = *this;
  for (auto* const known : {&moved.device_numerator, &moved.device_denominator, &moved.found_inf, &moved.skipped_steps})
    if (known->defined()) *known = known->to(device, /*non_blocking=*/true);
  return moved;
}

GRADACCUM_INLINE DeviceMultiplier Multiplier::pointers() const {
  const auto number = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<double>() : nullptr;
  };
  const auto flag = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
  };
  return {numerator,       denominator,        number(device_numerator), number(device_denominator),
          flag(found_inf), flag(skipped_steps)};
}

GRADACCUM_INLINE std::uint64_t sample_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.numel() == 0)
    return 0;
  const auto* const bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  if (!bytes) return 0;
  const std::size_t all =
      tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : static_cast<std::size_t>(tensor.element_size());
  const std::size_t size = std::min(all, sizeof(std::uint64_t)), last = all - size;
  constexpr std::size_t most = 8;
  const std::size_t places = last == 0 ? 1 : most;
  std::uint64_t sample = 1, odd = 0x9E3779B97F4A7C15ULL;  // an odd factor keeps any change of one word
  for (std::size_t i = 0; i < places; ++i, odd += 2 * 0xBF58476D1CE4E5B9ULL) {
    std::uint64_t word = 0;
    const auto* const place = bytes + last * i / (most - 1);
    size == sizeof(word) ? std::memcpy(&word, place, sizeof(word)) : std::memcpy(&word, place, size);
    sample += word * odd;
  }
  return sample;
}

/// Calls the listener after the hook that was in the slot. The scope owns the listener, which may hold the parameter.
struct GradReadyHook final : torch::autograd::PostAccumulateGradHook {
  GradReadyHook(const std::shared_ptr<GradReadyListener>& whom, std::size_t where)
      : listener(whom), address(whom.get()), place(where) {}

  void operator()(const at::Tensor& parameter) override {
    const auto there = listener.lock();  // keeps the listener alive during the calls
    if (there) there->added(place);
    if (before) (*before)(parameter);
    if (there) there->grad_ready(place);
  }

  std::weak_ptr<GradReadyListener> listener;
  const GradReadyListener* address;
  std::size_t place;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> before;
};

GRADACCUM_INLINE GradReadyScope::GradReadyScope(std::shared_ptr<GradReadyListener> listener)
    : listener_(std::move(listener)) {
  std::vector<std::pair<const at::Tensor*, std::unique_ptr<GradReadyHook>>> hooks;
  const auto& parameters = listener_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].requires_grad())
      hooks.emplace_back(&parameters[i], std::make_unique<GradReadyHook>(listener_, i));
  for (auto& [parameter, hook] : hooks) listening_.push_back(parameter);
  for (auto& [parameter, hook] : hooks) {
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(*parameter);
    hook->before = std::move(slot);
    slot = std::move(hook);
  }
}

/// Takes a listener's hook out of the chain, since scopes may end in any order.
GRADACCUM_INLINE void unhook(std::unique_ptr<torch::autograd::PostAccumulateGradHook>& slot,
                             const GradReadyListener& listener) {
  auto* const hook = dynamic_cast<GradReadyHook*>(slot.get());
  if (!hook) return;
  if (hook->address != &listener) return unhook(hook->before, listener);
  auto before = std::move(hook->before);
  slot = std::move(before);
}

GRADACCUM_INLINE GradReadyScope::~GradReadyScope() {
  listener_->end();
  for (auto* const parameter : listening_) unhook(torch::autograd::impl::post_acc_grad_hooks(*parameter), *listener_);
}

GRADACCUM_INLINE bool is_waited_for(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (hook) {
    const auto* const ours = dynamic_cast<const GradReadyHook*>(hook);
    const auto listener = ours ? ours->listener.lock() : nullptr;
    if (!ours || (listener && listener->waits_for_whole())) return true;
    hook = ours->before.get();
  }
  return false;
}

GRADACCUM_INLINE void say_added(const at::Tensor& parameter) {
  const auto* hook = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
  while (const auto* const ours = dynamic_cast<const GradReadyHook*>(hook)) {
    if (const auto listener = ours->listener.lock()) listener->grad_ready(ours->place);
    hook = ours->before.get();
  }
}

GRADACCUM_INLINE Shards::Shards(std::vector<at::Tensor> parameters, bool may_be_cut, int rank, int world_size)
    : parameters_(std::move(parameters)), pieces_(parameters_.size()), rank_(rank), world_size_(world_size) {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> largest_first(size());
  std::iota(largest_first.begin(), largest_first.end(), std::size_t{0});
  std::ranges::stable_sort(largest_first, std::greater(), [&](auto place) { return parameters_[place].nbytes(); });
  std::vector<std::int64_t> bytes_of_rank(static_cast<std::size_t>(world_size));
  for (auto place : largest_first) divide(place, may_be_cut, bytes_of_rank);
  for (std::size_t place = 0; place < size(); ++place) {
    const auto& parameter = parameters_[place];
    const auto piece = own_piece(place);
    if (piece.size() == parameter.numel())
      own_.push_back(parameter);
    else if (piece.size() > 0)
      own_.push_back(part(place, piece, parameter).set_requires_grad(parameter.requires_grad()));
    else
      own_.push_back(at::empty({0}, parameter.options()));
  }
}

GRADACCUM_INLINE void Shards::divide(std::size_t place, bool may_be_cut, std::vector<std::int64_t>& bytes_of_rank) {
  const auto& parameter = parameters_[place];
  std::vector<std::size_t> ranks(bytes_of_rank.size());  // by their bytes, the least first
  std::iota(ranks.begin(), ranks.end(), std::size_t{0});
  std::ranges::stable_sort(ranks, {}, [&](auto rank) { return bytes_of_rank[rank]; });
  auto& pieces = pieces_[place];
  if (may_be_cut && parameter.numel() / unit >= world_size_ && parameter.is_contiguous())
    pieces = cut(parameter.numel(), ranks);
  else
    pieces = {{static_cast<int>(ranks[0]), 0, parameter.numel()}};
  for (auto& piece : pieces)
    bytes_of_rank[static_cast<std::size_t>(piece.rank)] +=
        piece.size() * static_cast<std::int64_t>(parameter.element_size());
}

/// Gives each rank as many whole units as the others; those left over go to the first in `ranks`.
GRADACCUM_INLINE std::vector<Shards::Piece> Shards::cut(std::int64_t elements, const std::vector<std::size_t>& ranks) {
  const auto number = static_cast<std::int64_t>(ranks.size()), units = elements / unit;
  std::vector<std::int64_t> units_of(ranks.size(), units / number);
  for (std::size_t i = 0; i < static_cast<std::size_t>(units % number); ++i) ++units_of[ranks[i]];
  std::vector<Piece> pieces;
  std::int64_t begin = 0;
  for (auto count : units_of) {
    pieces.push_back({static_cast<int>(pieces.size()), begin, begin + count * unit});
    begin = pieces.back().end;
  }
  pieces.back().end = elements;
  return pieces;
}

GRADACCUM_INLINE void Shards::with_own(torch::optim::Optimizer& optimizer, c10::function_ref<void()> work) {
  swap_groups(optimizer);
  const auto back = c10::make_scope_exit([&] { swap_groups(optimizer); });
  work();
}

GRADACCUM_INLINE void Shards::check_parameters(const std::vector<at::Tensor>& parameters) const {
  TORCH_CHECK(
      same_parameters(parameters, parameters_),
      "Shard: the optimizer's parameters must not change after the Replicas are constructed; add them before that");
}

GRADACCUM_INLINE void Shards::check(const torch::optim::Optimizer& optimizer) const {
  check_parameters(parameters_of(optimizer));
  for (std::size_t place = 0; place < size(); ++place) {
    const auto& parameter = parameters_[place];
    const auto piece = own_piece(place);
    const auto* const begin = static_cast<const char*>(parameter.const_data_ptr()) +
                              piece.begin * static_cast<std::int64_t>(parameter.element_size());
    TORCH_CHECK(piece.size() == 0 || own_[place].const_data_ptr() == begin, "Shard: a parameter of shape ",
                parameter.sizes(),
                " must keep its memory after the Replicas are constructed; move the model to its device before that");
    TORCH_CHECK(own_[place].is_same(parameter) || optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0,
                "Shard: the optimizer has state of a whole parameter of shape ", parameter.sizes(),
                ", of which this rank steps a shard; load it by ga::load, or by ga::OptimizerState of the accumulator");
  }
}

GRADACCUM_INLINE void Shards::swap_groups(torch::optim::Optimizer& optimizer) noexcept {
  std::size_t place = 0;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) std::swap(parameter, own_[place++]);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
