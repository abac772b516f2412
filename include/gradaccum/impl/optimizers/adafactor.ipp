// SPDX-License-Identifier: Apache-2.0
// Adafactor: its options and state, its passes over a tensor on the CPU, and its launches on a device.
#pragma once

#include <gradaccum/optim/adafactor.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/device_batches.hpp>
#include <gradaccum/detail/optimizers/steps.hpp>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

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

/// A range of whole rows, or of elements of a vector. May span several small matrices.
struct AdafactorPiece {
  std::int64_t from, to, part;
  double parameter_squares = 0, update_squares = 0;
};

/// A parameter on the CPU, and its step's memory. Its pieces do not depend on the number of threads, and their sums are
/// added in order, so neither does the result.
class AdafactorTensor {
 public:
  AdafactorTensor(const AdafactorStep& step, double multiplier)
      : settings_(step.settings), owner_(step.parameter), parameter_(row_major(owner_, owner_.scalar_type())) {
    gradient_ = in_reach(step.gradient, owner_, multiplier);
    gradient_ = row_major(gradient_, gradient_type(owner_, gradient_));
    operand_.numbers = numbers_of(settings_, multiplier);
    operand_.parameter = parameter_.mutable_data_ptr();
    operand_.gradient = gradient_.const_data_ptr();
    operand_.exp_avg = step.exp_avg.defined() ? step.exp_avg.mutable_data_ptr() : nullptr;
    operand_.rounding_key = step.rounding_key.value_or(0);
    set_shape(step);
    cut();
    const bool narrow = !operand_.variance && operand_.columns < 8;
    const OperandTypes types{owner_.scalar_type(), gradient_.scalar_type(), step.rounding_key.has_value()};
    kernels_ = narrow ? narrow_adafactor_kernels(types) : adafactor_kernels(types);
    extra_elements_ = (parameter_.is_same(owner_) ? 0 : elements()) +
                      (gradient_.is_same(step.gradient) ? 0 : elements()) + (factors_.defined() ? factors_.numel() : 0);
  }

  // The passes, in this order. Each must finish for the whole tensor before the next begins.
  void sum(AdafactorPiece& piece) const {
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
  void make_factors(std::int64_t matrix) const { kernels_.factors(operand_, matrix); }
  void measure_update(AdafactorPiece& piece) const {
    piece.update_squares = kernels_.update_squares(operand_, piece.from, piece.to);
  }
  void set_step_size() {
    double parameter_squares = 0, update_squares = 0;
    for (auto& piece : pieces_) {
      parameter_squares += piece.parameter_squares;
      update_squares += piece.update_squares;
    }
    detail::set_step_size(operand_.numbers, settings_, static_cast<double>(elements()), parameter_squares,
                          update_squares);
  }
  void move(const AdafactorPiece& piece) const { kernels_.move(operand_, piece.from, piece.to); }
  void write_back() const { detail::write_back(owner_, parameter_); }

  std::vector<AdafactorPiece>& pieces() { return pieces_; }
  /// The number of matrices that are split into pieces. `sum` makes the factors and measures the update of all others.
  std::int64_t cut_matrices() const { return operand_.parts > 1 ? operand_.matrices : 0; }
  std::int64_t elements() const { return parameter_.numel(); }
  std::int64_t extra_elements() const { return extra_elements_; }  ///< allocated in addition to the parameter's

 private:
  void set_shape(const AdafactorStep& step) {
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
    // Many rows, as each part has its own column sums; but not too many, since these have the state's dtype.
    constexpr std::int64_t least_rows = 1 << 7, most_rows = 1 << 12, most_parts = 16;
    o.parts = std::clamp<std::int64_t>(o.rows / least_rows, 1, std::max(most_parts, o.rows / most_rows));
    factors_ = at::zeros({o.matrices * (o.rows + o.parts * o.columns)}, step.row_var.options());
    o.row_factors = factors_.mutable_data_ptr();
    o.column_factors = static_cast<char*>(o.row_factors) + o.matrices * o.rows * factors_.element_size();
  }

  void cut() {
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

  AdafactorSettings settings_;
  at::Tensor owner_, parameter_, gradient_, factors_;
  AdafactorOperand operand_;
  AdafactorKernels kernels_;
  std::vector<AdafactorPiece> pieces_;
  std::int64_t extra_elements_ = 0;
};

/// Runs all passes over some tensors. `each(count, body)` calls `body(i)` for each i below `count`.
template <class Each>
void run_passes(const std::vector<AdafactorTensor*>& tensors, const Each& each) {
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
GRADACCUM_INLINE void run_passes(std::vector<AdafactorTensor>& tensors) {
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
  const auto stride = static_cast<std::size_t>(threads);
  parallel(std::min(stride, whole.size()), [&](std::size_t first) {
    for (auto i = first; i < whole.size(); i += stride) run_passes({whole[i]}, serial);
  });
  run_passes(large, parallel);
  for (auto& tensor : tensors) tensor.write_back();
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier) {
  std::vector<AdafactorTensor> tensors;
  std::int64_t extra = 0;
  for (auto& step : steps) {
    if (!step.parameter.is_cpu() || step.parameter.numel() == 0) continue;
    tensors.emplace_back(step, multiplier);
    extra += tensors.back().extra_elements();
    if (extra <= most_copied) continue;
    run_passes(tensors);
    tensors.clear();
    extra = 0;
  }
  run_passes(tensors);
}

/// Runs our kernels for a batch, by launches of one mix of dtypes and at most a full table, in the same scratch memory.
class AdafactorLaunches {
 public:
  AdafactorLaunches(const StepBatch<AdafactorStep>& batch, const Multiplier& multiplier, const DeviceKernels& kernels)
      : kernels_(&kernels), device_(batch.front().step.parameter.device()), by_(multiplier.moved_to(device_)) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& step = batch[i].step;
      const auto types = types_of(step);
      auto launch = std::ranges::find_if(
          launches_, [&](const Launch& of) { return of.types == types && of.steps.size() < AdafactorTable::capacity; });
      if (launch == launches_.end()) launch = launches_.insert(launch, {types});
      launch->steps.emplace_back(i, launch->bytes);
      const auto size = static_cast<std::int64_t>(at::elementSize(state_type(step.parameter)));
      launch->bytes += AdafactorMemory::bytes(shape_of(step), size);
    }
  }

  void allocate(Scratch& scratch) {
    std::int64_t bytes = 0;
    for (auto& launch : launches_) bytes = std::max(bytes, launch.bytes);
    memory_ = scratch.tensor(bytes, at::kByte);
  }

  void operator()(const StepBatch<AdafactorStep>& batch, at::TensorList parameters, at::TensorList gradients) const {
    const c10::DeviceGuard guard(device_);
    for (auto& launch : launches_) {
      AdafactorTable table;
      for (auto& [i, offset] : launch.steps)
        table.add(entry(batch[i].step, parameters[i], gradients[i], memory_.mutable_data_ptr<std::uint8_t>() + offset));
      kernels_->adafactor({batch.front().step.settings, by_.pointers(), table}, launch.types, native_stream(device_));
    }
  }

 private:
  struct Launch {
    OperandTypes types;
    std::vector<std::pair<std::size_t, std::int64_t>> steps = {};  // each one's index, and the offset of its memory
    std::int64_t bytes = 0;
  };

  static AdafactorShape shape_of(const AdafactorStep& step) {
    const auto& p = step.parameter;
    if (step.variance.defined()) return AdafactorShape::of_vector(p.numel());
    return AdafactorShape::of_matrices(p.numel(), p.size(-2), p.size(-1));
  }

  static AdafactorTable::Entry entry(const AdafactorStep& step, const at::Tensor& parameter, const at::Tensor& gradient,
                                     void* memory) {
    const auto data = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
    return {.parameter = parameter.mutable_data_ptr(),
            .gradient = gradient.const_data_ptr(),
            .row_var = data(step.variance.defined() ? step.variance : step.row_var),
            .col_var = data(step.col_var),
            .exp_avg = data(step.exp_avg),
            .memory = memory,
            .shape = shape_of(step),
            .rounding_key = step.rounding_key.value_or(0)};
  }

  const DeviceKernels* kernels_;
  at::Device device_;
  Multiplier by_;
  std::vector<Launch> launches_;
  at::Tensor memory_;
};

GRADACCUM_INLINE void add_kernel_steps(StepPlan& plan, const std::vector<AdafactorStep>& steps,
                                       const Multiplier& multiplier, const DeviceKernels& kernels) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/true,
              [&](auto& batch, at::Device) { return AdafactorLaunches(batch, multiplier, kernels); });
}

}  // namespace gradaccum::detail

namespace gradaccum::optim {

GRADACCUM_INLINE void AdafactorOptions::check() const {
  const auto [eps1, eps2] = eps();
  const auto not_negative = [](const char* what, double value) {
    TORCH_CHECK(value >= 0 && detail::is_finite(value), "Adafactor: ", what, " must be finite and >= 0, got ", value);
  };
  not_negative("lr", lr());
  not_negative("eps[0], of the squared gradient,", eps1);
  not_negative("eps[1], of the parameter's RMS,", eps2);
  not_negative("weight_decay", weight_decay());
  TORCH_CHECK(beta2_decay() <= 0 && detail::is_finite(beta2_decay()),
              "Adafactor: beta2_decay must be finite and <= 0, got ", beta2_decay());
  TORCH_CHECK(d() > 0, "Adafactor: d must be > 0, got ", d(), "; infinity switches clipping off");
  TORCH_CHECK(beta1() >= 0 && beta1() < 1, "Adafactor: beta1 must be in [0, 1), got ", beta1());
  TORCH_CHECK(relative_step() || !warmup_init(), "Adafactor: warmup_init must come with relative_step; set both");
  TORCH_CHECK(variant() == AdafactorVariant::paper || variant() == AdafactorVariant::pytorch,
              "Adafactor: variant must be AdafactorVariant::paper or pytorch, got ", static_cast<int>(variant()));
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
                    step(), " must be defined, for a parameter of shape ", parameter.sizes(), ", got none");
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

GRADACCUM_INLINE detail::AdafactorStep Adafactor::next_step(const AdafactorOptions& options,
                                                            const at::Tensor& parameter, const at::Tensor& gradient,
                                                            AdafactorParamState& state) {
  TORCH_CHECK(!parameter.is_complex(), "Adafactor: a parameter must be real, got ", parameter.scalar_type());
  TORCH_CHECK(!gradient.is_sparse(), "Adafactor: a gradient must be dense, got a sparse one for a parameter of shape ",
              parameter.sizes(), "; use AdamW, or an embedding that is not sparse");
  const bool has_momentum = options.beta1() != 0;
  state.check(parameter);
  state.prepare(parameter, has_momentum);
  state.step(state.step() + 1);
  const auto [eps1, eps2] = options.eps();
  const detail::AdafactorSettings settings{.lr = options.lr(),
                                           .eps1 = eps1,
                                           .eps2 = eps2,
                                           .d = options.d(),
                                           .weight_decay = options.weight_decay(),
                                           .beta1 = options.beta1(),
                                           .scale_parameter = options.scale_parameter(),
                                           .pytorch = options.variant() == AdafactorVariant::pytorch,
                                           .beta2_decay = options.beta2_decay(),
                                           .relative_step = options.relative_step(),
                                           .warmup_init = options.warmup_init()};
  return {detail::at_step(settings, static_cast<double>(state.step())),
          parameter,
          gradient,
          state.row_var(),
          state.col_var(),
          state.variance(),
          has_momentum ? state.exp_avg() : at::Tensor()};
}

GRADACCUM_INLINE detail::PreparedStep Adafactor::prepare_steps(const detail::GradientOf& gradient_of,
                                                               const detail::Multiplier& multiplier) {
  std::vector<detail::AdafactorStep> steps;
  std::vector<AdafactorParamState> states;
  for (auto& group : param_groups()) {
    const auto& options = static_cast<const AdafactorOptions&>(group.options());
    check(options);  // may have been changed or loaded
    for (auto& parameter : group.params()) {
      const auto& gradient = gradient_of(parameter);
      if (!gradient.defined()) continue;
      detail::check_can_be_stepped(name, parameter, gradient);
      const auto* const known = known_state(parameter);
      auto& state = states.emplace_back(known ? *known : AdafactorParamState());
      steps.push_back(next_step(options, parameter, gradient, state));
    }
  }
  auto finish = [this, states = std::move(states)](auto& stepped) mutable {
    for (std::size_t i = 0; i < stepped.size(); ++i) state_of(stepped[i].parameter) = std::move(states[i]);
  };
  return prepared<detail::AdafactorStep>({}, multiplier, std::move(steps), std::move(finish));
}

}  // namespace gradaccum::optim

#undef GRADACCUM_INLINE
