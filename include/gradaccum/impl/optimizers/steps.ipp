// SPDX-License-Identifier: Apache-2.0
// All ways to make a step: in one pass on the processor, by rows, by kernels on a device, by ATen's operations.
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/device_kernels.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <map>
#include <type_traits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE double host_number(const Multiplier& multiplier) {
  return multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).item<double>();
}

/// True if a step by rows is possible: on the CPU, for a plain table of real numbers, without a weight decay that is
/// added to the gradient, since it gives all rows moments. False for multipliers that do not keep zeros, with which the
/// dense step would change the other rows, too: NaN, infinity (also after conversion to float32, in which kernels
/// compute) and negative numbers, which give -0. Rows of 8-bit moments must be whole blocks.
template <class Step>
bool steps_by_rows(const Step& step, const Multiplier& multiplier) {
  const auto &parameter = step.parameter, &gradient = step.gradient;
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !parameter.is_cpu() || parameter.numel() == 0)
    return false;
  if (!is_plain(parameter) || !parameter.is_contiguous() || parameter.is_complex() || gradient.is_complex())
    return false;
  if (parameter.size(0) > std::numeric_limits<std::int32_t>::max()) return false;
  if (std::is_same_v<Step, Adam8bitStep> && parameter.numel() / parameter.size(0) % eight_bit_block != 0) return false;
  if (numbers_of(step.settings, 1.0).weight_decay != 0) return false;
  const double by = host_number(multiplier);
  const double most =
      state_type(parameter) == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return detail::is_finite(by) && by <= most && !std::signbit(by);
}

/// A tensor of a parameter's state, and its layout in case there is none yet.
struct Moments {
  at::Tensor& tensor;
  const char* name;
  at::ScalarType type = at::ScalarType::Undefined;
  std::int64_t per_row = 0;  ///< elements for each row of the parameter
  std::int64_t zero = 0;     ///< the value that represents zero
};

/// Returns the rows in which the bits of a moment differ from zero.
GRADACCUM_INLINE at::Tensor rows_in_use(std::int64_t number, const std::vector<Moments>& all) {
  constexpr std::int64_t at_once = 4096;
  std::vector<at::Tensor> found;
  for (std::int64_t from = 0; from < number; from += at_once) {
    const auto rows = std::min(at_once, number - from);
    auto used = at::full({rows}, false, at::TensorOptions(at::kBool));
    for (auto& moments : all) {
      if (!moments.tensor.defined()) continue;
      const auto size = moments.tensor.element_size();
      const auto bits = moments.tensor.contiguous().view({number, moments.per_row}).narrow(0, from, rows);
      used.logical_or_(bits.view(size == 8 ? at::kLong : size == 4 ? at::kInt : at::kByte).ne(moments.zero).any(1));
    }
    found.push_back(used.nonzero().flatten().add_(from));
  }
  return at::cat(found);
}

/// The rows of a table that a step with a sparse gradient reads. The step is bitwise equal to the dense step in all
/// rows that the dense step would change. Moments are sparse tensors of the rows that have had a gradient; other rows
/// are 0.
class StepRows {
 public:
  /// Collects the rows. `moments` must be all that the parameter has.
  StepRows(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Moments>& moments)
      : moments_(static_cast<std::size_t>(parameter.size(0)), -1), values_(moments_.size(), -1) {
    const auto summed = gradient.coalesce();
    gradient_ = summed._values();
    const auto known = std::ranges::find_if(moments, [](const Moments& of) { return of.tensor.defined(); });
    if (known == moments.end())
      rows_ = at::empty({0}, at::kLong);
    else
      rows_ = known->tensor.is_sparse() ? known->tensor._indices()[0] : rows_in_use(parameter.size(0), moments);
    had_ = rows_.size(0);
    const auto* const had = rows_.contiguous().const_data_ptr<std::int64_t>();
    std::int32_t index = 0;
    for (std::int64_t i = 0; i < had_; ++i) moments_[static_cast<std::size_t>(had[i])] = index++;
    const auto of_gradient = summed._indices()[0].contiguous();
    const auto* const numbers = of_gradient.const_data_ptr<std::int64_t>();
    std::vector<std::int64_t> added;
    for (std::int64_t i = 0; i < of_gradient.size(0); ++i) {
      const auto row = static_cast<std::size_t>(numbers[i]);
      values_[row] = static_cast<std::int32_t>(i);
      if (moments_[row] >= 0) continue;
      moments_[row] = index++;
      added.push_back(numbers[i]);
    }
    if (!added.empty()) rows_ = at::cat({rows_, at::tensor(added, at::kLong)});
  }

  /// The values of the gradient's rows, without duplicates.
  const at::Tensor& gradient() const { return gradient_; }

  /// Returns the rows' moments, zeros for new rows, then a scratch row for each task of `run`; grows by an eighth.
  at::Tensor values_of(const Moments& moments) const {
    const auto needed = count() + tasks;
    at::Tensor values;
    if (moments.tensor.defined())
      values = moments.tensor.is_sparse()
                   ? moments.tensor._values().reshape({-1, moments.per_row})
                   : moments.tensor.reshape({-1, moments.per_row}).index_select(0, rows_.narrow(0, 0, had_));
    if (values.defined()) {
      const auto room = static_cast<std::int64_t>(values.storage().nbytes()) / values.element_size() / moments.per_row;
      if (values.storage_offset() == 0 && values.is_contiguous() && room >= needed) {
        auto all = values.as_strided({needed, moments.per_row}, {moments.per_row, 1});
        all.narrow(0, had_, needed - had_).fill_(moments.zero);  // a step that failed may have written there
        return all;
      }
    }
    auto grown = at::full({needed + count() / 8, moments.per_row}, moments.zero, at::TensorOptions(moments.type));
    if (values.defined()) grown.narrow(0, 0, had_).copy_(values);
    return grown.narrow(0, 0, needed);
  }

  /// Returns the rows' values as a sparse tensor of the parameter's state.
  at::Tensor state_of(const at::Tensor& values, const at::Tensor& parameter) const {
    const auto per_row = values.size(1);
    std::vector<std::int64_t> sizes{parameter.size(0), per_row}, of_values{count(), per_row};
    if (per_row == parameter.numel() / parameter.size(0)) {
      sizes = parameter.sizes().vec();
      of_values = sizes;
      of_values[0] = count();
    }
    return at::_sparse_coo_tensor_unsafe(rows_.unsqueeze(0), values.narrow(0, 0, count()).view(of_values), sizes,
                                         values.options().layout(at::kSparse));
  }

  /// A row's number in the table, its index in the moments, and that in the gradient, or a negative number.
  struct Row {
    std::int64_t number, moments, gradient;
  };
  /// Calls `body` for each row on LibTorch's threads; with `all`, also for rows without moments, whose zeros must stay.
  template <class Body>
  void run(bool all, const Body& body) const {
    const auto number = static_cast<std::int64_t>(moments_.size()), share = (number + tasks - 1) / tasks;
    parallel_for(tasks, [&](std::int64_t task) {
      for (auto row = task * share; row < std::min(number, (task + 1) * share); ++row) {
        const auto index = moments_[static_cast<std::size_t>(row)];
        if (index < 0 && !all) continue;
        body(Row{row, index >= 0 ? index : count() + task, values_[static_cast<std::size_t>(row)]});
      }
    });
  }

 private:
  static constexpr std::int64_t tasks = 64;

  std::int64_t count() const { return rows_.size(0); }

  at::Tensor rows_, gradient_;                  // row numbers (int64) in the order of first use; the gradient's values
  std::int64_t had_ = 0;                        // number of rows that had moments before
  std::vector<std::int32_t> moments_, values_;  // by row of the table: its index in `rows_` and in the gradient, or -1
};

template <class Step>
at::Tensor state_tensor(const Step& step, const at::Tensor& moments) {
  return step.rows ? step.rows->state_of(moments, step.parameter) : moments;
}

/// Returns a step's rows, and replaces the moments by their values. If one is dense, all become so: rows are shared.
GRADACCUM_INLINE std::shared_ptr<const StepRows> rows_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                         const std::vector<Moments>& moments) {
  if (std::ranges::any_of(moments, [](const Moments& of) { return of.tensor.defined() && !of.tensor.is_sparse(); }))
    for (auto& of : moments) of.tensor = dense_of(of.tensor, of.zero);
  auto rows = std::make_shared<const StepRows>(parameter, gradient, moments);
  for (auto& of : moments) of.tensor = rows->values_of(of);
  return rows;
}

/// Prepares float moments for a step by rows if that is possible, else for a dense one, with a dense gradient.
template <class Step>
void prepare_moments(Step& step, std::vector<Moments> moments, const Multiplier& multiplier) {
  const auto& parameter = step.parameter;
  if (!steps_by_rows(step, multiplier)) {
    if (step.gradient.is_sparse()) step.gradient = step.gradient.to_dense();
    for (auto& of : moments) of.tensor = checked_state(dense_of(of.tensor), parameter, of.name);
    return;
  }
  for (auto& [tensor, name, type, per_row, zero] : moments) {
    TORCH_CHECK(!tensor.defined() || !tensor.is_sparse() ||
                    (tensor.sparse_dim() == 1 && tensor.sizes() == parameter.sizes() && tensor.is_cpu()),
                "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
                ", got rows of ", tensor.sizes());
    if (tensor.defined() && !tensor.is_sparse()) tensor = checked_state(tensor, parameter, name);
    type = state_type(parameter);
    per_row = parameter.numel() / parameter.size(0);
  }
  step.rows = rows_of(parameter, step.gradient, moments);
}

/// Returns true if rows with neither a gradient nor moments change, too: by decoupled weight decay, and by an eps that
/// is 0 or denormal in float32, which turns them into NaN.
GRADACCUM_INLINE bool moves_all_rows(const AdamSettings& by) {
  return (by.decoupled && by.lr * by.weight_decay != 0) || by.eps < std::numeric_limits<float>::min();
}
GRADACCUM_INLINE bool moves_all_rows(const SgdSettings&) { return false; }

/// Returns the address from which kernels count: the table's first, if the `index`-th row in memory is its `row`-th.
template <class T>
T* first_of_table(T* memory, std::int64_t index, std::int64_t row, std::int64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return reinterpret_cast<T*>(address + static_cast<std::uintptr_t>((index - row) * bytes));
}

/// Calls `visit(place, tensor)` for each tensor of the state and its place in the operand.
template <class Step, class Visit>
void for_each_state(const Step& step, typename Step::Operand& operand, const Visit& visit) {
  const auto tensors = step.state();
  std::size_t i = 0;
  std::apply([&](auto&... places) { (visit(places, tensors[i++]), ...); }, Step::state_of(operand));
}

/// Runs one parameter's step by rows.
template <class Step>
void step_rows(const Step& step, typename Step::Operand operand) {
  const auto& parameter = step.parameter;
  auto gradient = in_reach(step.rows->gradient(), parameter, operand.numbers.multiplier);
  gradient = gradient.to(gradient_type(parameter, gradient)).contiguous();
  const auto width = parameter.numel() / parameter.size(0);
  const auto none = at::zeros({width}, gradient.options());
  auto* const kernel =
      kernel_of<Step::cpu_kernel>()(parameter.scalar_type(), gradient.scalar_type(), step.rounding_key.has_value());
  operand.parameter = parameter.mutable_data_ptr();
  operand.rounding_key = step.rounding_key.value_or(0);
  const auto bytes = static_cast<std::int64_t>(gradient.element_size()) * width;
  const void* const values = gradient.const_data_ptr();
  const void* const zeros = none.const_data_ptr();
  step.rows->run(moves_all_rows(step.settings), [&](const StepRows::Row& row) {
    auto of_row = operand;
    of_row.gradient = row.gradient < 0 ? first_of_table(zeros, 0, row.number, bytes)
                                       : first_of_table(values, row.gradient, row.number, bytes);
    for_each_state(step, of_row, [&](auto*& place, const at::Tensor* state) {
      if (state) place = first_of_table(place, row.moments, row.number, state->element_size() * state->size(1));
    });
    kernel(of_row, row.number * width, width);
  });
  write_back(parameter, parameter);
}

GRADACCUM_INLINE AdamStep prepared(AdamStep step, const Multiplier& multiplier) {
  std::vector<Moments> moments{{step.exp_avg, "exp_avg"}, {step.exp_avg_sq, "exp_avg_sq"}};
  if (step.settings.amsgrad)
    moments.push_back({step.max_exp_avg_sq, "max_exp_avg_sq"});
  else
    step.max_exp_avg_sq = dense_of(step.max_exp_avg_sq);
  prepare_moments(step, moments, multiplier);
  return step;
}

GRADACCUM_INLINE SgdStep prepared(SgdStep step, const Multiplier& multiplier) {
  std::vector<Moments> moments;
  if (step.settings.momentum != 0) moments.push_back({step.momentum_buffer, "momentum_buffer"});
  prepare_moments(step, moments, multiplier);
  return step;
}

template <class Step>
void step_on_cpu(const std::vector<Step>& steps, double multiplier) {
  constexpr bool by_blocks = std::is_same_v<Step, Adam8bitStep>;
  KernelLoop<typename Step::Operand> loop(steps.size(), by_blocks ? eight_bit_block : ElementLoop::cache_line);
  typename Step::Operand operand{};
  const Step* last = nullptr;
  for (auto& step : steps) {
    if (!step.parameter.is_cpu()) continue;
    if (!last || !(step.settings == last->settings)) operand.numbers = numbers_of(step.settings, multiplier);
    last = &step;
    for_each_state(step, operand, [](auto*& place, const at::Tensor* state) {
      place = static_cast<std::remove_reference_t<decltype(place)>>(state ? state->mutable_data_ptr() : nullptr);
    });
    if (step.rows)
      step_rows(step, operand);
    else
      loop.add(operand, kernel_of<Step::cpu_kernel>(), step.parameter, step.gradient, step.rounding_key);
  }
  loop.run();
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
    const auto kernels_for = narrow ? narrow_adafactor_kernels : kernel_of<&Kernels::adafactor>();
    kernels_ = kernels_for(owner_.scalar_type(), gradient_.scalar_type(), step.rounding_key.has_value());
    extra_elements_ = (parameter_.is_same(owner_) ? 0 : elements()) +
                      (gradient_.is_same(step.gradient) ? 0 : elements()) + (factors_.defined() ? factors_.numel() : 0);
  }

  // The passes, in this order. Each must finish for the whole tensor before the next begins.
  void sum(AdafactorPiece& piece) const {
    const auto& o = operand_;
    if (settings_.scale_parameter)
      piece.parameter_squares = kernel_of<&Kernels::sum_of_squares>()(parameter_.scalar_type())(
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
    AdafactorSums sums{static_cast<double>(elements()), 0, 0};
    for (auto& piece : pieces_) {
      sums.parameter_squares += piece.parameter_squares;
      sums.update_squares += piece.update_squares;
    }
    detail::set_step_size(operand_.numbers, settings_, sums);
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

/// A range of a tensor's real numbers in memory order, `[from, to)`; or all of them, in any order.
struct Extent {
  std::int64_t from, to;
  bool whole;

  std::int64_t size() const { return to - from; }
  at::Tensor of(const at::Tensor& tensor) const {
    if (whole || !tensor.defined()) return tensor;
    const auto real = as_real(tensor);
    return real.as_strided({size()}, {1}, real.storage_offset() + from);
  }
};

/// A parameter and its gradient, to be stepped by ATen's operations or by our own kernel.
struct DeviceOperand {
  at::Tensor parameter, gradient;
  std::optional<std::uint64_t> rounding_key;
  bool by_kernel = false;  ///< our own kernel, which accepts dtypes and a factor as they are, and rounds
  bool row_major = false;  ///< for kernels that use rows and columns

  /// True if a copy is needed: for a factor (`multiplied`), the dtype, or the order of the elements.
  bool copies_parameter() const {
    return !is_plain(parameter) || parameter.scalar_type() != dtype_of_parameter() ||
           (row_major && !parameter.is_contiguous());
  }
  bool copies_gradient(bool multiplied) const {
    return (multiplied && !by_kernel) || gradient.scalar_type() != dtype_of_gradient() || !is_plain(gradient) ||
           !(row_major ? gradient.is_contiguous() : same_order(parameter, gradient));
  }
  at::ScalarType dtype_of_parameter() const { return by_kernel ? parameter.scalar_type() : state_type(parameter); }
  at::ScalarType dtype_of_gradient() const {
    return by_kernel ? gradient_type(parameter, gradient) : state_type(parameter);
  }
  /// A tensor with the sizes and strides of copies.
  at::Tensor layout() const {
    if (!row_major || parameter.is_contiguous()) return plain_layout_of(parameter);
    return at::empty(parameter.sizes(), parameter.options().device(at::kMeta));
  }
  Extent whole() const {
    return {0, parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(), /*whole=*/true};
  }
  /// Splits the elements into parts of at most `most_copied`, if their order allows it.
  std::vector<Extent> cut() const {
    const auto all = whole();
    const bool lie_alike = is_plain(parameter) && is_plain(gradient) && same_order(parameter, gradient);
    if (all.size() <= most_copied || !lie_alike || row_major) return {all};
    std::vector<Extent> extents;
    for (std::int64_t from = 0; from < all.to; from += most_copied)
      extents.push_back({from, std::min(from + most_copied, all.to), /*whole=*/false});
    return extents;
  }
};

/// Returns `found_inf` on `device`, for operations that skip a step by themselves.
GRADACCUM_INLINE std::optional<at::Tensor> found_inf_on(at::Device device, const Multiplier& multiplier) {
  if (!multiplier.found_inf.defined()) return {};
  return multiplier.found_inf.to(device, /*non_blocking=*/true);
}

GRADACCUM_INLINE at::Tensor is_skipped_on(at::Device device, const Multiplier& multiplier) {
  const auto found_inf = found_inf_on(device, multiplier);
  return found_inf ? found_inf->to(at::kBool) : at::Tensor();
}

GRADACCUM_INLINE void round_stochastically_(const at::Tensor& numbers, std::uint64_t key, at::Tensor random_bits,
                                            at::Tensor is_nan) {
  auto generator = at::globalContext().defaultGenerator(numbers.device()).clone();
  generator.set_current_seed(key);
  at::ne_out(is_nan, numbers, numbers);
  random_bits.random_(0, 1 << 16, generator).add_(numbers.view(at::kInt)).bitwise_and_(-(1 << 16));
  auto result = numbers;
  at::where_out(result, is_nan, numbers, random_bits.view(at::kFloat));
}

/// The parameters and gradients of one part of a step in the memory that is used in the computation, which is their own
/// or copies. All are on one device and, except for our own kernels, computed in one dtype.
class DeviceOperands {
 public:
  explicit DeviceOperands(Multiplier by) : by_(std::move(by)) {}
  void add(DeviceOperand operand, const Extent& extent) {
    operand.parameter = extent.of(operand.parameter);
    operand.gradient = extent.of(operand.gradient);
    // Rounds each part of a parameter with different random numbers.
    if (operand.rounding_key) *operand.rounding_key += static_cast<std::uint64_t>(extent.from);
    if (!by_.on_host() && !factor_.defined()) {
      wide_factor_ = by_.on(operand.parameter.device());
      factor_ = wide_factor_.to(at::toRealValueType(state_type(operand.parameter)));
    }
    parts_.push_back({operand, operand.layout()});
  }

  void allocate(Scratch& scratch) {
    for (auto& part : parts_) {
      if (part.copies_parameter()) part.parameter_copy = scratch.tensor(part.layout, part.dtype_of_parameter());
      if (part.copies_gradient(!by_.is_one()))
        part.gradient_copy = scratch.tensor(part.layout, part.dtype_of_gradient());
      if (!part.rounding_key || part.by_kernel) continue;
      part.random_bits = scratch.tensor(part.layout, at::kInt);
      part.is_nan = scratch.tensor(part.layout, at::kBool);
    }
  }

  /// Fills the copies, and multiplies the gradients by the factor.
  void read() {
    std::vector<at::Tensor> parameter_copies, parameters, gradient_copies, gradients, lazy;
    for (auto& part : parts_) {
      if (part.parameter_copy.defined()) {
        parameter_copies.push_back(part.parameter_copy);
        parameters.push_back(part.parameter);
      }
      if (!part.gradient_copy.defined()) continue;
      const bool wide = part.gradient.element_size() > part.gradient_copy.element_size();
      if (wide && !by_.is_one()) {  // may exceed the copy's dtype before it is multiplied
        at::mul_out(part.gradient_copy, part.gradient,
                    by_.on_host() ? at::scalar_tensor(by_.host(), at::kDouble) : wide_factor_);
      } else if (part.gradient.is_conj() || part.gradient.is_neg() || part.gradient._is_zerotensor()) {
        lazy.push_back(part.gradient_copy.copy_(part.gradient));  // foreach operations would copy these
      } else {
        gradient_copies.push_back(part.gradient_copy);
        gradients.push_back(part.gradient);
      }
    }
    if (!parameters.empty()) at::_foreach_copy_(parameter_copies, parameters);
    if (!gradients.empty()) at::_foreach_copy_(gradient_copies, gradients);
    gradient_copies.insert(gradient_copies.end(), lazy.begin(), lazy.end());
    if (by_.is_one() || gradient_copies.empty()) return;
    for (auto& copy : gradient_copies) copy = as_real(copy);
    by_.on_host() ? at::_foreach_mul_(gradient_copies, by_.host()) : at::_foreach_mul_(gradient_copies, factor_);
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (auto& part : parts_) all.push_back(as_real(part.stepped()));
    return all;
  }

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (auto& part : parts_) all.push_back(as_real(part.gradient_copy.defined() ? part.gradient_copy : part.gradient));
    return all;
  }

  /// Ends the step: rounds copies stochastically if requested, and writes the parameters back.
  void write_back() const {
    for (auto& part : parts_) {
      if (part.rounding_key && !part.by_kernel)
        round_stochastically_(part.parameter_copy, *part.rounding_key, part.random_bits, part.is_nan);
      detail::write_back(part.parameter, part.stepped());
    }
  }

 private:
  struct Part : DeviceOperand {
    at::Tensor layout;  // has the sizes and strides of copies
    at::Tensor parameter_copy = {}, gradient_copy = {}, random_bits = {}, is_nan = {};

    const at::Tensor& stepped() const { return parameter_copy.defined() ? parameter_copy : parameter; }
  };

  std::vector<Part> parts_;
  Multiplier by_;
  at::Tensor factor_, wide_factor_;  // known only on the device: in the computation's dtype, and in float64
};

/// One parameter's step on a device, or a part of it.
template <class Step>
struct StepPart {
  Step step;
  Extent extent;
};

/// Adafactor's kernels use rows and columns.
template <class Step>
DeviceOperand operand_of(const Step& step, bool by_kernel) {
  return {step.parameter, step.gradient, step.rounding_key, by_kernel,
          /*row_major=*/by_kernel && std::is_same_v<Step, AdafactorStep>};
}

/// Splits steps into batches for one operation each: of one device, equal settings and, except for our own kernels, one
/// dtype (16-bit ones are computed in float32). Limits the memory for copies, for which large steps are split.
template <class Step>
std::vector<std::vector<StepPart<Step>>> batches_of(const std::vector<Step>& steps, bool multiplied, bool by_kernel) {
  std::vector<std::vector<StepPart<Step>>> batches;
  std::int64_t copied = 0;
  const auto add = [&](const Step& step, const Extent& extent, std::int64_t more) {
    const auto* const first = batches.empty() ? nullptr : &batches.back().front().step;
    if (!first || copied + more > most_copied || !(step.settings == first->settings) ||
        step.parameter.device() != first->parameter.device() ||
        (!by_kernel && step.parameter.scalar_type() != first->parameter.scalar_type())) {
      batches.emplace_back();
      copied = 0;
    }
    batches.back().push_back({step, extent});
    copied += more;
  };
  for (auto& step : steps)
    if (const auto operand = operand_of(step, by_kernel);
        operand.copies_parameter() || operand.copies_gradient(multiplied))
      for (auto& extent : operand.cut()) add(step, extent, extent.size());
    else
      add(step, operand.whole(), 0);
  return batches;
}

/// A batch's step, which `body(batch, parameters, gradients)` runs, with scratch memory if it has an `allocate`.
template <class Step, class Body>
class BatchStep final : public DeviceStep {
 public:
  BatchStep(std::vector<StepPart<Step>> batch, const Multiplier& multiplier, Body body, bool by_kernel)
      : batch_(std::move(batch)), operands_(multiplier), body_(std::move(body)) {
    for (auto& part : batch_) operands_.add(operand_of(part.step, by_kernel), part.extent);
  }
  void allocate(Scratch& scratch) override {
    operands_.allocate(scratch);
    if constexpr (requires { body_.allocate(scratch); }) body_.allocate(scratch);
  }
  void run() override {
    operands_.read();
    body_(batch_, operands_.parameters(), operands_.gradients());
    operands_.write_back();
  }

 private:
  std::vector<StepPart<Step>> batch_;
  DeviceOperands operands_;
  Body body_;
};

/// Adds steps in batches, whose bodies `body_for(batch, device)` makes. Our own kernels apply the factor themselves.
template <class Step, class BodyFor>
void add_batches(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, bool by_kernel,
                 const BodyFor& body_for) {
  for (auto& batch : batches_of(steps, !by_kernel && !multiplier.is_one(), by_kernel)) {
    const auto device = batch.front().step.parameter.device();
    auto body = body_for(batch, device);
    plan.add(device, std::make_unique<BatchStep<Step, decltype(body)>>(
                         std::move(batch), by_kernel ? Multiplier() : multiplier, std::move(body), by_kernel));
  }
}

/// Returns the dtypes of the kernel to call.
template <class Step>
OperandTypes types_of(const Step& step) {
  return {at::toRealValueType(step.parameter.scalar_type()),
          at::toRealValueType(gradient_type(step.parameter, step.gradient)), step.rounding_key.has_value()};
}

/// Launches our own kernel for a batch of steps, once for each mix of dtypes and each full table of tensors.
template <class Step>
void launch_kernel(const DeviceKernels& kernels, const Multiplier& by, at::Device device,
                   const std::vector<StepPart<Step>>& batch, at::TensorList parameters, at::TensorList gradients) {
  const auto& first = batch.front().step;
  using Launch = StepLaunch<std::remove_cvref_t<decltype(first.kernel_settings())>>;
  const auto kernel = first.kernel(kernels);
  const c10::DeviceGuard guard(device);
  auto* const stream = native_stream(device);
  std::map<OperandTypes, Launch> launches;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto& [step, extent] = batch[i];
    const auto types = types_of(step);
    auto found = launches.find(types);
    if (found == launches.end()) found = launches.try_emplace(types, first.kernel_settings(), by.pointers()).first;
    auto& launch = found->second;
    if (launch.tensors.full()) {
      kernel(launch, types, stream);
      launch.tensors = {};
    }
    std::array<void*, 6> arrays{parameters[i].mutable_data_ptr(), const_cast<void*>(gradients[i].const_data_ptr())};
    std::size_t next = 2;
    for (const auto* tensor : step.state()) arrays[next++] = tensor ? tensor->mutable_data_ptr() : nullptr;
    launch.tensors.add({arrays, extent.from, parameters[i].numel(), step.rounding_key.value_or(0)});
  }
  for (auto& [types, launch] : launches) kernel(launch, types, stream);
}

/// Adds steps by our own device kernels, on many tensors at a time, in one pass over their memory (Adafactor's: a few).
template <class Step>
void add_kernel_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier,
                      const DeviceKernels& kernels) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/true, [&](const auto&, at::Device device) {
    return [&kernels, by = multiplier.moved_to(device), device](const std::vector<StepPart<Step>>& batch,
                                                                at::TensorList p, at::TensorList g) {
      launch_kernel(kernels, by, device, batch, p, g);
    };
  });
}

/// Runs ATen's fused operation for a batch. It does not advance the device's step count.
class FusedAdam {
 public:
  FusedAdam(const AdamSettings& by, const Multiplier& multiplier, at::Device device)
      : by_(by),
        count_(at::full({}, static_cast<double>(by.step), at::TensorOptions(at::kFloat).device(device))),
        found_inf_(found_inf_on(device, multiplier)) {
    // Stays at least 1, even if the state was replaced since the host last read the number of skipped steps.
    if (multiplier.skipped_steps.defined())
      count_.sub_(multiplier.skipped_steps.to(device, /*non_blocking=*/true)).clamp_min_(1);
  }

  void operator()(const std::vector<StepPart<AdamStep>>& batch, at::TensorList parameters,
                  at::TensorList gradients) const {
    std::vector<at::Tensor> m, v, x;
    for (auto& [step, extent] : batch) {
      m.push_back(as_real(extent.of(step.exp_avg)));
      v.push_back(as_real(extent.of(step.exp_avg_sq)));
      if (by_.amsgrad) x.push_back(as_real(extent.of(step.max_exp_avg_sq)));
    }
    const std::vector<at::Tensor> counts(batch.size(), count_);
    using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                       double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&);
    auto* const fused = by_.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_);
    fused(parameters, gradients, m, v, x, counts, by_.lr, by_.beta1, by_.beta2, by_.weight_decay, by_.eps, by_.amsgrad,
          /*maximize=*/false, std::nullopt, found_inf_);
  }

 private:
  AdamSettings by_;
  at::Tensor count_;
  std::optional<at::Tensor> found_inf_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<AdamStep>& steps,
                                      const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](auto& batch, at::Device device) {
    return FusedAdam(batch.front().step.settings, multiplier, device);
  });
}

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](auto& steps_of_batch, at::Device device) {
    return [by = steps_of_batch.front().step.settings, found_inf = found_inf_on(device, multiplier)](
               const std::vector<StepPart<SgdStep>>& batch, at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> buffers;
      for (auto& [step, extent] : batch)
        if (by.momentum != 0) buffers.push_back(as_real(extent.of(step.momentum_buffer)));
      at::_fused_sgd_(p, g, buffers, by.weight_decay, by.momentum, by.lr, by.dampening, by.nesterov,
                      /*maximize=*/false, by.first, std::nullopt, found_inf);
    };
  });
}

GRADACCUM_INLINE std::int64_t blocks_of(const at::Tensor& tensor) { return eight_bit_blocks(tensor.numel()); }

GRADACCUM_INLINE Codes zero_codes(const at::Tensor& like, bool is_signed) {
  return {at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kByte)).fill_(is_signed * zero_code),
          at::zeros({blocks_of(like)}, like.options().dtype(at::kFloat))};
}

/// Returns a plain tensor's elements in memory order, as whole blocks, the last of which ends with zeros.
GRADACCUM_INLINE at::Tensor blocks_in(const at::Tensor& plain) {
  const auto blocks = blocks_of(plain);
  const auto missing = blocks * eight_bit_block - plain.numel();
  return at::constant_pad_nd(plain.as_strided({plain.numel()}, {1}), {0, missing}).view({blocks, eight_bit_block});
}

/// Returns the number of each code, relative to its block's scale.
GRADACCUM_INLINE at::Tensor numbers_of_codes(bool is_signed) {
  return at::tensor(at::ArrayRef<float>((is_signed ? signed_map() : second_moment_map()).values));
}

GRADACCUM_INLINE at::Tensor decoded(const Codes& moments, bool is_signed) {
  const auto& like = moments.codes;
  const auto codes = blocks_in(like), values = copied_to(like.device(), numbers_of_codes(is_signed));
  const auto numbers = values.index_select(0, codes.flatten().to(at::kInt)).view_as(codes);
  return numbers.mul(moments.scales.unsqueeze(1)).as_strided(like.sizes(), like.strides());
}

GRADACCUM_INLINE Codes encoded(const at::Tensor& numbers, bool is_signed) {
  const auto values = numbers_of_codes(is_signed);
  // The midpoints of successive values: the code of a number is the count of those below it.
  const auto middles = values.slice(0, 0, 255).add(values.diff(), 0.5);
  if (!is_signed) middles.slice(0, 0, 1).zero_();  // second moments
  auto codes = zero_codes(numbers, is_signed);
  const auto blocks = blocks_in(numbers);
  codes.scales = blocks.abs().amax(1);
  const auto usable = codes.scales.ge(std::numeric_limits<float>::min());
  const auto by = codes.scales.reciprocal().masked_fill_(usable.logical_not(), 0);
  const auto indices = at::bucketize(blocks.mul(by.unsqueeze(1)), copied_to(numbers.device(), middles),
                                     /*out_int32=*/true);
  codes.codes.copy_(indices.as_strided(numbers.sizes(), numbers.strides()));
  return codes;
}

GRADACCUM_INLINE Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed,
                                     const char* name) {
  const auto like = plain_layout_of(parameter);
  if (!moments.codes.defined())
    return zero_codes(like.is_meta() ? at::empty_strided(like.sizes(), like.strides(), parameter.options()) : like,
                      is_signed);
  const auto& [codes, scales] = moments;
  TORCH_CHECK(state_type(parameter) == at::kFloat, "optimizer state: ", name, " must be floating for a parameter in ",
              parameter.scalar_type(), ", got 8-bit codes; the state was loaded for another model");
  TORCH_CHECK(codes.sizes() == parameter.sizes() && codes.scalar_type() == at::kByte && is_plain(codes) &&
                  scales.defined() && scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                  scales.sizes() == at::IntArrayRef{blocks_of(parameter)} && codes.device() == parameter.device() &&
                  scales.device() == parameter.device(),
              "optimizer state: ", name, " must have codes of the shape and device of its parameter, ",
              parameter.sizes(), " on ", parameter.device(), ", and a scale for each ", eight_bit_block,
              "; the state was loaded for another model");
  if (same_order(like, codes)) return moments;
  return encoded(in_order_of(like, decoded(moments, is_signed), at::kFloat), is_signed);
}

/// Returns dense moments. Dense scales are 1-D.
GRADACCUM_INLINE Codes dense_of(const Codes& moments, bool is_signed) {
  if (!moments.codes.defined() || !moments.codes.is_sparse()) return moments;
  return {dense_of(moments.codes, is_signed ? zero_code : 0), dense_of(moments.scales).flatten()};
}

GRADACCUM_INLINE Adam8bitStep prepared(Adam8bitStep step, const Multiplier& multiplier) {
  const auto& parameter = step.parameter;
  const bool by_rows = steps_by_rows(step, multiplier);
  const auto prepare = [&](Codes& moments, bool is_signed, const char* name) {
    if (!by_rows || (moments.codes.defined() && !moments.codes.is_sparse()))
      moments = checked_state(dense_of(moments, is_signed), parameter, is_signed, name);
  };
  prepare(step.exp_avg, true, "exp_avg");
  prepare(step.exp_avg_sq, false, "exp_avg_sq");
  if (by_rows) {
    const auto width = parameter.numel() / parameter.size(0), scales = width / eight_bit_block;
    step.rows = rows_of(parameter, step.gradient,
                        {{step.exp_avg.codes, "exp_avg", at::kByte, width, zero_code},
                         {step.exp_avg.scales, "exp_avg_scale", at::kFloat, scales},
                         {step.exp_avg_sq.codes, "exp_avg_sq", at::kByte, width},
                         {step.exp_avg_sq.scales, "exp_avg_sq_scale", at::kFloat, scales}});
  } else if (step.gradient.is_sparse()) {
    step.gradient = step.gradient.to_dense();
  }
  return step;
}

/// Runs our kernels for a batch, by launches of one mix of dtypes and at most a full table, in the same scratch memory.
class AdafactorLaunches {
 public:
  using Batch = std::vector<StepPart<AdafactorStep>>;

  AdafactorLaunches(const Batch& batch, const Multiplier& multiplier, const DeviceKernels& kernels)
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

  void operator()(const Batch& batch, at::TensorList parameters, at::TensorList gradients) const {
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

GRADACCUM_INLINE bool has_kernel(const at::Tensor& parameter, const at::Tensor& gradient) {
  const auto type = parameter.scalar_type();
  // A gradient wider than the state may exceed float32 before it is multiplied.
  return device_kernels() && parameter.is_cuda() && has_kernels(at::toRealValueType(type)) &&
         type != at::kComplexHalf && at::elementSize(gradient.scalar_type()) <= at::elementSize(state_type(parameter));
}

/// Throws if there is no kernel for the step of an optimizer that ATen lacks.
GRADACCUM_INLINE void check_has_kernel(const char* optimizer, const at::Tensor& parameter, const at::Tensor& gradient) {
  if (has_kernel(parameter, gradient)) return;
  const auto device = parameter.device();
  TORCH_CHECK(parameter.is_cuda(), optimizer, ": a parameter must be on the CPU or a CUDA device, got one on ", device,
              "; use AdamW, which steps on all devices");
  TORCH_CHECK(device_kernels(), optimizer, ": a parameter on ", device,
              " must be stepped by gradaccum's CUDA kernels, got a program that was built without them; configure it "
              "with -DGRADACCUM_CUDA=ON and link gradaccum::compiled, or use AdamW");
  TORCH_CHECK(false, optimizer, ": a gradient on ", device, " must be at most as wide as the optimizer's state (",
              state_type(parameter), "), got ", gradient.scalar_type(), "; convert it");
}

template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, const char* optimizer) {
  constexpr bool is_in_aten = std::is_same_v<Step, AdamStep> || std::is_same_v<Step, SgdStep>;
  std::vector<Step> ours, others;
  for (auto& step : steps) {
    if (step.parameter.numel() == 0) continue;
    if constexpr (!is_in_aten) check_has_kernel(optimizer, step.parameter, step.gradient);
    (has_kernel(step.parameter, step.gradient) ? ours : others).push_back(step);
  }
  if (!ours.empty()) add_kernel_steps(plan, ours, multiplier, *device_kernels());
  if constexpr (is_in_aten) plan_aten_steps(plan, others, multiplier);
}

#ifdef GRADACCUM_COMPILED
template void plan_steps(StepPlan&, const std::vector<AdamStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<SgdStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<Adam8bitStep>&, const Multiplier&, const char*);
template void plan_steps(StepPlan&, const std::vector<AdafactorStep>&, const Multiplier&, const char*);
template void step_on_cpu(const std::vector<AdamStep>&, double);
template void step_on_cpu(const std::vector<SgdStep>&, double);
template void step_on_cpu(const std::vector<Adam8bitStep>&, double);
#endif

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
