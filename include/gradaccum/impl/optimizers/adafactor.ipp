// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_step.hpp>
#include <gradaccum/optim/adafactor.hpp>

#include <gradaccum/archive.hpp>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Calls `visit(name, tensor, shape)` for each state tensor that a step of the parameter needs.
template <class Visit>
void for_each_needed(optim::AdafactorParamState& state, const at::Tensor& parameter, bool momentum,
                     const Visit& visit) {
  if (parameter.dim() < 2) {
    visit("variance", state.variance(), parameter.sizes());
  } else {
    auto rows = parameter.sizes().vec(), columns = rows;
    rows.back() = columns[columns.size() - 2] = 1;
    visit("row_var", state.row_var(), at::IntArrayRef(rows));
    visit("col_var", state.col_var(), at::IntArrayRef(columns));
  }
  if (momentum) visit("exp_avg", state.exp_avg(), parameter.sizes());
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE void AdafactorOptions::check() const {
  const auto [eps1, eps2] = eps();
  const auto not_negative = [](const char* what, double value) {
    TORCH_CHECK(value >= 0 && std::isfinite(value), "Adafactor: ", what, " must be finite and >= 0, got ", value);
  };
  not_negative("lr", lr());
  not_negative("eps[0], of the squared gradient,", eps1);
  not_negative("eps[1], of the parameter's RMS,", eps2);
  not_negative("weight_decay", weight_decay());
  TORCH_CHECK(beta2_decay() <= 0 && std::isfinite(beta2_decay()),
              "Adafactor: beta2_decay must be finite and <= 0, got ", beta2_decay());
  TORCH_CHECK(d() > 0, "Adafactor: d must be > 0, got ", d(), "; infinity switches clipping off");
  TORCH_CHECK(beta1() >= 0 && beta1() < 1, "Adafactor: beta1 must be in [0, 1), got ", beta1());
  TORCH_CHECK(relative_step() || !warmup_init(), "Adafactor: warmup_init must come with relative_step, got it without");
  TORCH_CHECK(variant() == AdafactorVariant::paper || variant() == AdafactorVariant::pytorch,
              "Adafactor: variant must be AdafactorVariant::paper or pytorch, got ", static_cast<int>(variant()));
}

GRADACCUM_INLINE void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(d);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta1);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(relative_step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(warmup_init);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(scale_parameter);
  archive.write("variant", c10::IValue(static_cast<std::int64_t>(variant())));
}

GRADACCUM_INLINE void AdafactorOptions::state(Archive& archive) {
  archive("lr", lr_);
  archive("beta2_decay", beta2_decay_);
  archive("eps1", std::get<0>(eps_));
  archive("eps2", std::get<1>(eps_));
  archive("d", d_);
  archive("weight_decay", weight_decay_);
  archive("beta1", beta1_);
  archive("relative_step", relative_step_);
  archive("warmup_init", warmup_init_);
  archive("scale_parameter", scale_parameter_);
  auto number = static_cast<std::int64_t>(variant());
  archive("variant", number);
  variant_ = static_cast<AdafactorVariant>(number);
  check();
}

GRADACCUM_INLINE void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(eps_t, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, d);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta1);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, relative_step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, warmup_init);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, scale_parameter);
  c10::IValue number;
  archive.read("variant", number);
  TORCH_CHECK(number.toInt() == 0 || number.toInt() == 1, "Adafactor: a file's variant must be 0 or 1, got ",
              number.toInt());
  variant(static_cast<AdafactorVariant>(number.toInt()));
  check();
}

GRADACCUM_INLINE bool operator==(const AdafactorOptions& a, const AdafactorOptions& b) {
  const auto all = [](const AdafactorOptions& of) {
    return std::tie(of.lr_, of.beta2_decay_, of.eps_, of.d_, of.weight_decay_, of.beta1_, of.relative_step_,
                    of.warmup_init_, of.scale_parameter_, of.variant_);
  };
  return all(a) == all(b);
}

GRADACCUM_INLINE std::unique_ptr<torch::optim::OptimizerParamState> AdafactorParamState::clone() const {
  return std::make_unique<AdafactorParamState>(*this);
}

GRADACCUM_INLINE std::vector<std::pair<std::string, at::Tensor*>> AdafactorParamState::tensors() {
  return {{"row_var", &row_var_}, {"col_var", &col_var_}, {"variance", &variance_}, {"exp_avg", &exp_avg_}};
}

GRADACCUM_INLINE void AdafactorParamState::check(const at::Tensor& parameter) const {
  TORCH_CHECK(step() >= 0 && step() < std::int64_t{1} << 53, "Adafactor: the step count must be >= 0, got ", step());
  auto copy = *this;  // copies handles: unneeded tensors remain in `copy`
  detail::for_each_needed(
      copy, parameter, /*momentum=*/true, [&](const char* slot, at::Tensor& state, at::IntArrayRef shape) {
        TORCH_CHECK(
            !state.defined() || (state.layout() == at::kStrided && state.sizes() == shape &&
                                 state.device() == parameter.device() && at::isFloatingType(state.scalar_type())),
            "Adafactor: state: ", slot, " must be floating, of shape ", shape, " on ", parameter.device(), ", got ",
            state.sizes(), " on ", state.device(), " (", state.scalar_type(),
            "); the state was loaded for another model");
        TORCH_CHECK(state.defined() || step() == 0 || &state == &copy.exp_avg_, "Adafactor: state: ", slot, " of step ",
                    step(), " must be there, of a parameter of shape ", parameter.sizes(), ", got none");
        state.reset();
      });
  for (auto& [slot, tensor] : copy.tensors())
    TORCH_CHECK(!tensor->defined(), "Adafactor: state: a parameter of shape ", parameter.sizes(), " has no ", slot,
                ", got one of ", tensor->sizes(), "; the state was loaded for another model");
}

GRADACCUM_INLINE void AdafactorParamState::prepare(const at::Tensor& parameter, bool momentum) {
  const auto type = detail::state_type(parameter);
  detail::for_each_needed(*this, parameter, momentum, [&](const char*, at::Tensor& state, at::IntArrayRef shape) {
    state = state.defined() ? detail::row_major(state, type) : at::zeros(shape, parameter.options().dtype(type));
  });
}

}  // namespace gradaccum::optim

namespace gradaccum::detail {

GRADACCUM_INLINE AdafactorStep adafactor_step_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                 const optim::AdafactorOptions& options,
                                                 const optim::AdafactorParamState& state) {
  const auto [eps1, eps2] = options.eps();
  const AdafactorSettings settings{.lr = options.lr(),
                                   .step_size = 0,
                                   .fresh2 = 0,
                                   .eps1 = eps1,
                                   .eps2 = eps2,
                                   .d = options.d(),
                                   .weight_decay = options.weight_decay(),
                                   .beta1 = options.beta1(),
                                   .scale_parameter = options.scale_parameter(),
                                   .pytorch = options.variant() == optim::AdafactorVariant::pytorch,
                                   .beta2_decay = options.beta2_decay(),
                                   .relative_step = options.relative_step(),
                                   .warmup_init = options.warmup_init()};
  return {at_step(settings, static_cast<double>(state.step())),
          parameter,
          gradient,
          state.row_var(),
          state.col_var(),
          state.variance(),
          options.beta1() != 0 ? state.exp_avg() : at::Tensor()};
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE Adafactor::Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                      AdafactorOptions defaults)
    : OwnOptimizer(groups, std::move(defaults)) {}

GRADACCUM_INLINE Adafactor::Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults)
    : OwnOptimizer(std::move(parameters), std::move(defaults)) {}

GRADACCUM_INLINE void Adafactor::move(const detail::GradientOf& gradient_of, const detail::Multiplier& multiplier) {
  std::vector<detail::AdafactorStep> steps;
  std::vector<std::pair<at::Tensor, AdafactorParamState>> states;  // become the optimizer's once the step is taken
  for (auto& group : param_groups()) {
    check(options_of(group));  // the options may have been changed or loaded
    for (auto& parameter : group.params())
      if (const at::Tensor& gradient = gradient_of(parameter); gradient.defined()) {
        states.emplace_back(parameter, next_state(parameter, gradient, options_of(group)));
        steps.push_back(detail::adafactor_step_of(parameter, gradient, options_of(group), states.back().second));
      }
  }
  detail::StepPlan moves;
  run_steps(moves, multiplier, steps);
  keep(std::move(states));
}

GRADACCUM_INLINE AdafactorParamState Adafactor::next_state(const at::Tensor& parameter, const at::Tensor& gradient,
                                                           const AdafactorOptions& options) const {
  TORCH_CHECK(!parameter.is_complex(), "Adafactor: a parameter must be real, got ", parameter.scalar_type());
  detail::check_can_be_stepped_densely(name, parameter, gradient);
  auto state = state_of(parameter);
  state.check(parameter);
  state.prepare(parameter, options.beta1() != 0);
  state.step(state.step() + 1);
  return state;
}

}  // namespace gradaccum::optim

namespace gradaccum::detail {

GRADACCUM_INLINE AdafactorTensor::AdafactorTensor(const AdafactorStep& step, double multiplier)
    : settings_(step.settings), owner_(step.parameter), parameter_(row_major(owner_, owner_.scalar_type())) {
  const auto type = owner_.scalar_type();
  gradient_ = step.gradient;
  if (at::elementSize(gradient_.scalar_type()) > at::elementSize(state_type(owner_)))
    gradient_ = gradient_.mul(std::exchange(multiplier, 1.0));  // may exceed float32 before it is multiplied
  gradient_ = row_major(gradient_, gradient_.scalar_type() == type ? type : state_type(owner_));
  operand_.numbers = numbers_of(settings_, multiplier);
  operand_.parameter = parameter_.mutable_data_ptr();
  operand_.gradient = gradient_.const_data_ptr();
  operand_.exp_avg = step.exp_avg.defined() ? step.exp_avg.mutable_data_ptr() : nullptr;
  operand_.rounding_key = step.rounding_key.value_or(0);
  set_shape(step);
  cut();
  const bool rounded = step.rounding_key.has_value(), narrow = !operand_.variance && operand_.columns < 8;
  kernels_ = narrow ? narrow_adafactor_kernels(type, gradient_.scalar_type(), rounded)
                    : adafactor_kernels(type, gradient_.scalar_type(), instruction_set(), rounded);
  extra_elements_ = (parameter_.is_same(owner_) ? 0 : elements()) +
                    (gradient_.is_same(step.gradient) ? 0 : elements()) + (factors_.defined() ? factors_.numel() : 0);
}

GRADACCUM_INLINE void AdafactorTensor::set_shape(const AdafactorStep& step) {
  auto& o = operand_;
  if (step.variance.defined()) {
    o.variance = step.variance.mutable_data_ptr();
    o.rows = elements();
    o.matrices = o.columns = o.parts = 1;
    return;
  }
  o.rows = owner_.size(-2);
  o.columns = owner_.size(-1);
  o.matrices = elements() / (o.rows * o.columns);
  o.row_var = step.row_var.mutable_data_ptr();
  o.col_var = step.col_var.mutable_data_ptr();
  // Each part keeps its own column sums. It needs many rows, so that these are small compared to the matrix, but not
  // too many, since the sums have the state's dtype.
  constexpr std::int64_t least_rows = 1 << 7, most_rows = 1 << 12, most_parts = 16;
  o.parts = std::clamp<std::int64_t>(o.rows / least_rows, 1, std::max(most_parts, o.rows / most_rows));
  factors_ = at::zeros({o.matrices * (o.rows + o.parts * o.columns)}, step.row_var.options());
  o.row_factors = factors_.mutable_data_ptr();
  o.column_factors = static_cast<char*>(o.row_factors) + o.matrices * o.rows * factors_.element_size();
}

GRADACCUM_INLINE void AdafactorTensor::cut() {
  const auto& o = operand_;
  const auto all_rows = o.matrices * o.rows;
  if (o.parts > 1) {
    for (std::int64_t matrix = 0; matrix < o.matrices; ++matrix)
      for (std::int64_t part = 0; part < o.parts; ++part)
        pieces_.push_back(
            {matrix * o.rows + part * o.rows / o.parts, matrix * o.rows + (part + 1) * o.rows / o.parts, part});
    return;
  }
  constexpr std::int64_t piece = 1 << 14;  // elements
  const auto unit = o.variance ? 1 : o.rows;
  const auto rows = std::max<std::int64_t>(1, piece / (unit * o.columns)) * unit;
  for (std::int64_t from = 0; from < all_rows; from += rows)
    pieces_.push_back({from, std::min(from + rows, all_rows), 0});
}

GRADACCUM_INLINE void AdafactorTensor::sum(AdafactorPiece& piece) const {
  const auto& o = operand_;
  if (settings_.scale_parameter)
    piece.parameter_squares = sum_of_squares_of(parameter_.scalar_type())(
        static_cast<const char*>(o.parameter) + piece.from * o.columns * parameter_.element_size(),
        (piece.to - piece.from) * o.columns);
  if (o.variance) {
    piece.update_squares = kernels_.vector_squares(o, piece.from, piece.to);
    return;
  }
  kernels_.sums(o, piece.from, piece.to, piece.part);
  if (o.parts > 1) return;
  for (auto matrix = piece.from / o.rows; matrix < piece.to / o.rows; ++matrix) make_factors(matrix);
  measure_update(piece);
}

GRADACCUM_INLINE void AdafactorTensor::set_step_size() {
  AdafactorSums sums{static_cast<double>(elements()), 0, 0};
  for (auto& piece : pieces_) {
    sums.parameter_squares += piece.parameter_squares;
    sums.update_squares += piece.update_squares;
  }
  detail::set_step_size(operand_.numbers, settings_, sums);
}

/// Runs all passes over some tensors. `each(count, body)` calls `body(i)` for each i below `count`.
template <class Each>
void take_passes(const std::vector<AdafactorTensor*>& tensors, const Each& each) {
  std::vector<std::pair<AdafactorTensor*, AdafactorPiece*>> pieces, cut;
  std::vector<std::pair<AdafactorTensor*, std::int64_t>> matrices;
  for (auto* tensor : tensors) {
    for (auto& piece : tensor->pieces()) pieces.emplace_back(tensor, &piece);
    for (std::int64_t i = 0; i < tensor->cut_matrices(); ++i) matrices.emplace_back(tensor, i);
    if (tensor->cut_matrices() > 0)
      for (auto& piece : tensor->pieces()) cut.emplace_back(tensor, &piece);
  }
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->sum(*pieces[i].second); });
  each(matrices.size(), [&](std::size_t i) { matrices[i].first->make_factors(matrices[i].second); });
  each(cut.size(), [&](std::size_t i) { cut[i].first->measure_update(*cut[i].second); });
  for (auto* tensor : tensors) tensor->set_step_size();
  each(pieces.size(), [&](std::size_t i) { pieces[i].first->move(*pieces[i].second); });
}

/// Gives each small tensor to a single thread, whose cache keeps the gradient from pass to pass and which never waits
/// for others. Splits tensors that are too large to balance the threads.
GRADACCUM_INLINE void take_passes(std::vector<AdafactorTensor>& tensors) {
  const auto parallel = [](std::size_t count, const auto& body) {
    if (count == 1) return body(0);  // starting threads would take longer
    if (count > 1)
      parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t i) { body(static_cast<std::size_t>(i)); });
  };
  const auto serial = [](std::size_t count, const auto& body) {
    for (std::size_t i = 0; i < count; ++i) body(i);
  };
  std::vector<AdafactorTensor*> whole, large;
  std::int64_t elements = 0;
  for (auto& tensor : tensors) elements += tensor.elements();
  const auto threads = at::get_num_threads();
  for (auto& tensor : tensors) (2 * threads * tensor.elements() <= elements ? whole : large).push_back(&tensor);
  std::stable_sort(whole.begin(), whole.end(), [](auto* a, auto* b) { return a->elements() > b->elements(); });
  const auto hands = static_cast<std::size_t>(threads);
  parallel(std::min(hands, whole.size()), [&](std::size_t first) {
    for (auto i = first; i < whole.size(); i += hands) take_passes({whole[i]}, serial);
  });
  take_passes(large, parallel);
  for (auto& tensor : tensors) tensor.write_back();
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier) {
  std::vector<AdafactorTensor> tensors;
  std::int64_t extra = 0;
  for (auto& step : steps) {
    if (step.parameter.numel() == 0) continue;
    tensors.emplace_back(step, multiplier);
    extra += tensors.back().extra_elements();
    if (extra <= most_copied) continue;
    take_passes(tensors);
    tensors.clear();
    extra = 0;
  }
  take_passes(tensors);
}

/// The 0-dim factors of a step on a device, computed there such that a skipped step changes nothing.
struct AdafactorWeights {
  AdafactorWeights(const AdafactorSettings& settings, const Multiplier& multiplier, at::Device device,
                   at::ScalarType dtype)
      : by(settings), skipped_steps(left_out_on(device, multiplier)) {
    const auto number = [&](double value) {
      return at::full({}, value, at::TensorOptions(at::kDouble).device(device));
    };
    fresh2 = number(by.fresh2);
    step_size = number(by.step_size);
    if (multiplier.skipped_steps.defined()) {
      const auto step =
          (by.step - multiplier.skipped_steps.to(device, /*non_blocking=*/true).to(at::kDouble)).clamp_min_(1);
      fresh2 = step.pow(by.beta2_decay);
      if (by.relative_step) step_size = at::minimum(by.warmup_init ? 1e-6 * step : number(by.lr), step.rsqrt());
    }
    keep_if_left_out(fresh2, 0);
    kept2 = (1 - fresh2).to(dtype);
    fresh2 = fresh2.to(dtype);
    step_size = step_size.to(dtype);
    kept1 = number(by.beta1).to(dtype);
    keep_if_left_out(kept1, 1);
  }

  bool fit(const AdafactorSettings& settings, at::Device device, at::ScalarType dtype) const {
    return settings == by && step_size.device() == device && step_size.scalar_type() == dtype;
  }

  /// Sets `factor` to `value`, which must leave everything unchanged, if the step is skipped.
  void keep_if_left_out(const at::Tensor& factor, double value) const {
    if (skipped_steps.defined()) factor.masked_fill_(skipped_steps, value);
  }

  AdafactorSettings by;
  at::Tensor skipped_steps, fresh2, kept2, step_size, kept1;
};

/// One parameter's step on a device.
class AdafactorMove final : public Move {
 public:
  AdafactorMove(const AdafactorStep& step, const Multiplier& multiplier, const AdafactorWeights& weights)
      : step_(step), operands_(multiplier), weights_(weights) {
    operands_.add(operand_of(step), operand_of(step).whole());
  }

  void take(Scratch& scratch) override {
    const auto dtype = state_type(step_.parameter);
    const auto number = [&] {
      const auto one = scratch.take(1, dtype);
      return one.defined() ? one.squeeze(0) : one;
    };
    operands_.take(scratch);
    update_ = scratch.take(operands_.layout(), dtype);
    step_size_ = number();
    norm_ = number();
    if (step_.variance.defined()) return;
    row_ = scratch.take(step_.row_var, dtype);
    col_ = scratch.take(step_.col_var, dtype);
    means_ = scratch.take(step_.row_var.numel() / step_.row_var.size(-2), dtype);
  }

  void run() override {
    operands_.read();
    auto p = operands_.parameters().front();
    step_size_.copy_(weights_.step_size);
    if (by().scale_parameter) step_size_.mul_(root_mean_square(p).clamp_min_(by().eps2));
    make_update(operands_.gradients().front());
    decay(p);
    step_size_.div_(root_mean_square(update_).div_(by().d).clamp_min_(1));
    p.sub_(with_momentum(update_.mul_(step_size_)));
    operands_.write_back();
  }

 private:
  const AdafactorSettings& by() const { return weights_.by; }

  at::Tensor root_mean_square(const at::Tensor& all) {
    return at::linalg_vector_norm_out(norm_, all, 2).div_(std::sqrt(static_cast<double>(all.numel())));
  }

  /// Updates the running estimate of the squared gradient, and divides the gradient by its root.
  void make_update(const at::Tensor& gradient) {
    at::mul_out(update_, gradient, gradient);
    weights_.keep_if_left_out(update_, 0);
    if (step_.variance.defined()) {
      move_on(step_.variance, update_);
      update_.copy_(step_.variance);
    } else {
      move_on(step_.row_var, at::mean_out(row_, update_, -1, /*keepdim=*/true));
      move_on(step_.col_var, at::mean_out(col_, update_, -2, /*keepdim=*/true));
      auto sizes = step_.row_var.sizes().vec();
      sizes[sizes.size() - 2] = 1;
      auto means = means_.view(sizes);
      at::mean_out(means, step_.row_var, -2, /*keepdim=*/true);
      at::div_out(row_, step_.row_var, by().pytorch ? means.clamp_min_(by().eps1) : means);
      at::mul_out(update_, row_, step_.col_var);
    }
    update_.sqrt_();
    if (by().pytorch) update_.clamp_min_(by().eps1);  // eps1^2 may be 0 in float32
    at::div_out(update_, gradient, update_);
    weights_.keep_if_left_out(update_, 0);
  }

  void move_on(const at::Tensor& average, at::Tensor fresh) const {
    average.mul_(weights_.kept2).addcmul_(fresh.add_(by().pytorch ? 0 : by().eps1), weights_.fresh2);
  }

  void decay(const at::Tensor& p) {
    if (by().weight_decay == 0) return;
    if (by().pytorch)
      norm_.fill_(1 - by().lr * by().weight_decay);
    else
      norm_.copy_(step_size_).mul_(-by().weight_decay).add_(1);
    weights_.keep_if_left_out(norm_, 1);
    p.mul_(norm_);
  }

  at::Tensor with_momentum(const at::Tensor& update) const {
    if (!step_.exp_avg.defined()) return update;
    step_.exp_avg.mul_(weights_.kept1).add_(update, 1 - by().beta1);
    if (!weights_.skipped_steps.defined()) return step_.exp_avg;
    return update.copy_(step_.exp_avg).masked_fill_(weights_.skipped_steps, 0);
  }

  AdafactorStep step_;
  DeviceOperands operands_;
  AdafactorWeights weights_;
  at::Tensor update_, step_size_, norm_, row_, col_, means_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& moves, const std::vector<AdafactorStep>& steps,
                                      const Multiplier& multiplier) {
  std::optional<AdafactorWeights> weights;
  for (auto& step : steps) {
    const auto device = step.parameter.device();
    const auto dtype = state_type(step.parameter);
    if (!weights || !weights->fit(step.settings, device, dtype))
      weights.emplace(step.settings, multiplier, device, dtype);
    moves.add(device, std::make_unique<AdafactorMove>(step, multiplier, *weights));
  }
}

GRADACCUM_INLINE void plan_steps(StepPlan& moves, const std::vector<AdafactorStep>& steps,
                                 const Multiplier& multiplier) {
  std::vector<AdafactorStep> with_elements;
  for (auto& step : steps)
    if (step.parameter.numel() > 0) with_elements.push_back(step);
  add_moves_by_kernels(moves, with_elements, multiplier);
}

GRADACCUM_INLINE DeviceOperand operand_of(const AdafactorStep& step, bool by_kernel) {
  return {step.parameter, step.gradient, step.rounding_key, by_kernel, /*row_major=*/by_kernel};
}

GRADACCUM_INLINE AdafactorShape kernel_shape(const AdafactorStep& step) {
  const auto& p = step.parameter;
  if (step.variance.defined()) return AdafactorShape::of_vector(p.numel());
  return AdafactorShape::of_matrices(p.numel(), p.size(-2), p.size(-1));
}

/// The steps of one launch, which share a mix of dtypes, and the offset of each step's scratch memory.
class AdafactorLaunchPlan {
 public:
  explicit AdafactorLaunchPlan(const OperandTypes& types) : types_(types) {}

  bool full() const { return places_.size() == AdafactorTable::capacity; }
  const OperandTypes& types() const { return types_; }
  std::int64_t bytes() const { return bytes_; }

  /// Adds the batch's `place`-th step.
  void add(std::size_t place, const AdafactorStep& step) {
    places_.emplace_back(place, bytes_);
    const auto size = static_cast<std::int64_t>(at::elementSize(state_type(step.parameter)));
    bytes_ += AdafactorMemory::bytes(kernel_shape(step), size);
  }

  AdafactorTable table(const std::vector<StepPart<AdafactorStep>>& batch, at::TensorList parameters,
                       at::TensorList gradients, char* memory) const {
    AdafactorTable table;
    for (auto& [place, from] : places_)
      table.add(entry(batch[place].step, parameters[place], gradients[place], memory + from));
    return table;
  }

 private:
  static AdafactorTable::Entry entry(const AdafactorStep& step, const at::Tensor& parameter, const at::Tensor& gradient,
                                     void* memory) {
    const auto data = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
    return {.parameter = parameter.mutable_data_ptr(),
            .gradient = gradient.const_data_ptr(),
            .row_var = data(step.variance.defined() ? step.variance : step.row_var),
            .col_var = step.variance.defined() ? nullptr : data(step.col_var),
            .exp_avg = data(step.exp_avg),
            .memory = memory,
            .shape = kernel_shape(step),
            .rounding_key = step.rounding_key.value_or(0)};
  }

  OperandTypes types_;
  std::vector<std::pair<std::size_t, std::int64_t>> places_;
  std::int64_t bytes_ = 0;
};

/// A batch of steps whose launches use the same scratch memory in turn.
class AdafactorKernelMove final : public Move {
 public:
  AdafactorKernelMove(std::vector<StepPart<AdafactorStep>> batch, const Multiplier& multiplier,
                      const DeviceKernels& kernels)
      : batch_(std::move(batch)),
        operands_(Multiplier()),
        kernels_(&kernels),
        device_(batch_.front().step.parameter.device()),
        by_(multiplier.moved_to(device_)) {
    std::map<OperandTypes, std::size_t> open;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      const auto& step = batch_[i].step;
      operands_.add(operand_of(step, /*by_kernel=*/true), batch_[i].extent);
      const auto types = types_of(step);
      const auto found = open.find(types);
      if (found == open.end() || plans_[found->second].full()) {
        open[types] = plans_.size();
        plans_.emplace_back(types);
      }
      plans_[open[types]].add(i, step);
    }
  }

  void take(Scratch& scratch) override {
    operands_.take(scratch);
    std::int64_t bytes = 0;
    for (auto& plan : plans_) bytes = std::max(bytes, plan.bytes());
    memory_ = scratch.take(bytes, at::kByte);
  }

  void run() override {
    operands_.read();
    const auto parameters = operands_.parameters(), gradients = operands_.gradients();
    {
      const c10::DeviceGuard guard(device_);
      for (auto& plan : plans_)
        kernels_->adafactor(
            {batch_.front().step.settings, by_.pointers(), plan.table(batch_, parameters, gradients, memory())},
            plan.types(), native_stream(device_));
    }
    operands_.write_back();
  }

 private:
  char* memory() const { return static_cast<char*>(memory_.mutable_data_ptr()); }

  std::vector<StepPart<AdafactorStep>> batch_;
  DeviceOperands operands_;
  const DeviceKernels* kernels_;
  at::Device device_;
  Multiplier by_;
  std::vector<AdafactorLaunchPlan> plans_;
  at::Tensor memory_;
};

GRADACCUM_INLINE void add_kernel_moves(StepPlan& moves, const std::vector<AdafactorStep>& steps,
                                       const Multiplier& multiplier, const DeviceKernels& kernels) {
  for (auto& batch : batches_of(steps, /*multiplied=*/false, /*by_kernel=*/true)) {
    const auto device = batch.front().step.parameter.device();
    moves.add(device, std::make_unique<AdafactorKernelMove>(std::move(batch), multiplier, kernels));
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
