// SPDX-License-Identifier: Apache-2.0
// All ways to make a step: in one pass on the processor, by rows, by kernels on a device, by ATen's operations.
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>

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
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE double host_number(const Multiplier& multiplier) {
  return multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).item<double>();
}

/// True if a step by rows is possible: on the CPU, for a plain table of real numbers. False for multipliers that do not
/// keep zeros, with which the dense step would change the other rows, too: NaN, infinity (also after conversion to
/// float32, in which kernels compute) and negative numbers, which give -0.
GRADACCUM_INLINE bool steps_by_rows(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const Multiplier& multiplier) {
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !parameter.is_cpu() || parameter.numel() == 0)
    return false;
  if (!is_plain(parameter) || !parameter.is_contiguous() || parameter.is_complex() || gradient.is_complex())
    return false;
  if (parameter.size(0) > std::numeric_limits<std::int32_t>::max()) return false;
  const double by = host_number(multiplier);
  const double most =
      state_type(parameter) == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return by <= most && !std::signbit(by);
}

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

GRADACCUM_INLINE StepRows::StepRows(const at::Tensor& parameter, const at::Tensor& gradient,
                                    const std::vector<Moments>& moments)
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

/// Appends a scratch row for each task. Grows the memory by an eighth, not row by row.
GRADACCUM_INLINE at::Tensor StepRows::values_of(const Moments& moments) const {
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

GRADACCUM_INLINE at::Tensor StepRows::state_of(const at::Tensor& values, const at::Tensor& parameter) const {
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

GRADACCUM_INLINE void StepRows::run(bool all, c10::function_ref<void(const Row&)> body) const {
  const auto number = static_cast<std::int64_t>(moments_.size()), share = (number + tasks - 1) / tasks;
  parallel_for(tasks, [&](std::int64_t task) {
    for (auto row = task * share; row < std::min(number, (task + 1) * share); ++row) {
      const auto index = moments_[static_cast<std::size_t>(row)];
      if (index >= 0 || all) body({row, index >= 0 ? index : count() + task, values_[static_cast<std::size_t>(row)]});
    }
  });
}

/// Returns a step's rows, and replaces the moments by the rows' values. Makes all moments dense if one is, since all
/// must have the same rows.
GRADACCUM_INLINE std::shared_ptr<const StepRows> rows_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                                         std::vector<Moments>& moments) {
  if (std::ranges::any_of(moments, [](const Moments& of) { return of.tensor.defined() && !of.tensor.is_sparse(); }))
    for (auto& of : moments) of.tensor = dense_of(of.tensor, of.zero);
  auto rows = std::make_shared<const StepRows>(parameter, gradient, moments);
  for (auto& of : moments) of.tensor = rows->values_of(of);
  return rows;
}

/// Float moments, one for each number of the parameter.
struct FloatMoments {
  at::Tensor& tensor;
  const char* name;
};

/// Prepares moments for a step by rows, which it returns; or for a dense step, for which it makes the gradient dense.
GRADACCUM_INLINE std::shared_ptr<const StepRows> prepare_moments(const at::Tensor& parameter, at::Tensor& gradient,
                                                                 const std::vector<FloatMoments>& moments,
                                                                 bool by_rows) {
  if (!by_rows) {
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    for (auto& [tensor, name] : moments) tensor = checked_state(dense_of(tensor), parameter, name);
    return nullptr;
  }
  std::vector<Moments> all;
  for (auto& [tensor, name] : moments) {
    TORCH_CHECK(!tensor.defined() || !tensor.is_sparse() ||
                    (tensor.sparse_dim() == 1 && tensor.sizes() == parameter.sizes() && tensor.is_cpu()),
                "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
                ", got rows of ", tensor.sizes());
    const bool is_dense = tensor.defined() && !tensor.is_sparse();
    all.push_back({is_dense ? checked_state(tensor, parameter, name) : tensor, state_type(parameter),
                   parameter.numel() / parameter.size(0)});
  }
  auto rows = rows_of(parameter, gradient, all);
  for (std::size_t i = 0; i < all.size(); ++i) moments[i].tensor = all[i].tensor;
  return rows;
}

/// Excludes a weight decay that is added to the gradient, since it gives all rows moments.
GRADACCUM_INLINE bool steps_by_rows(const AdamSettings& by, const at::Tensor& parameter, const at::Tensor& gradient,
                                    const Multiplier& multiplier) {
  return (by.decoupled || by.weight_decay == 0) && steps_by_rows(parameter, gradient, multiplier);
}

/// Returns true if rows with neither a gradient nor moments change, too: by decoupled weight decay, and by an eps that
/// is 0 or denormal in float32, which turns them into NaN.
GRADACCUM_INLINE bool moves_all_rows(const AdamSettings& by) {
  return (by.decoupled && by.lr * by.weight_decay != 0) || by.eps < std::numeric_limits<float>::min();
}

/// Returns the address that the table's first element would have if the `index`-th row in memory were the table's
/// `row`-th. Kernels count from a table's first element.
template <class T>
T* first_of_table(T* memory, std::int64_t index, std::int64_t row, std::int64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return reinterpret_cast<T*>(address + static_cast<std::uintptr_t>((index - row) * bytes));
}

/// Runs one parameter's step by rows; with `all`, also of rows that have neither a gradient nor moments.
/// `point(operand, row)` sets the operand's moments.
template <class Step, class Operand, class KernelFor, class Point>
void step_rows(const Step& step, Operand operand, const KernelFor& kernel_for, bool all, const Point& point) {
  const auto& parameter = step.parameter;
  auto gradient = step.rows->gradient();
  if (at::elementSize(gradient.scalar_type()) > at::elementSize(state_type(parameter)))
    gradient = gradient.mul(std::exchange(operand.numbers.multiplier, 1.0));
  const bool same = gradient.scalar_type() == parameter.scalar_type();
  gradient = gradient.to(same ? parameter.scalar_type() : state_type(parameter)).contiguous();
  const auto width = parameter.numel() / parameter.size(0);
  const auto none = at::zeros({width}, gradient.options());
  const auto kernel =
      kernel_for(parameter.scalar_type(), gradient.scalar_type(), instruction_set(), step.rounding_key.has_value());
  operand.parameter = parameter.mutable_data_ptr();
  operand.rounding_key = step.rounding_key.value_or(0);
  const auto bytes = static_cast<std::int64_t>(gradient.element_size()) * width;
  const void* const values = gradient.const_data_ptr();
  const void* const zeros = none.const_data_ptr();
  step.rows->run(all, [&](const StepRows::Row& row) {
    Operand of_row = operand;
    of_row.gradient = row.gradient < 0 ? first_of_table(zeros, 0, row.number, bytes)
                                       : first_of_table(values, row.gradient, row.number, bytes);
    point(of_row, row);
    kernel(of_row, row.number * width, width);
  });
  write_back(parameter, parameter);
}

GRADACCUM_INLINE AdamStep adam_step_of(const AdamSettings& settings, const at::Tensor& parameter,
                                       const at::Tensor& gradient, const at::Tensor& exp_avg,
                                       const at::Tensor& exp_avg_sq, const at::Tensor& max_exp_avg_sq,
                                       const Multiplier& multiplier) {
  AdamStep step{settings, parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq};
  std::vector<FloatMoments> moments{{step.exp_avg, "exp_avg"}, {step.exp_avg_sq, "exp_avg_sq"}};
  if (settings.amsgrad)
    moments.push_back({step.max_exp_avg_sq, "max_exp_avg_sq"});
  else
    step.max_exp_avg_sq = dense_of(max_exp_avg_sq);
  step.rows =
      prepare_moments(parameter, step.gradient, moments, steps_by_rows(settings, parameter, gradient, multiplier));
  return step;
}

GRADACCUM_INLINE SgdStep sgd_step_of(const SgdSettings& settings, const at::Tensor& parameter,
                                     const at::Tensor& gradient, const at::Tensor& momentum_buffer,
                                     const Multiplier& multiplier) {
  SgdStep step{settings, parameter, gradient, momentum_buffer};
  std::vector<FloatMoments> moments;
  if (settings.momentum != 0) moments.push_back({step.momentum_buffer, "momentum_buffer"});
  step.rows = prepare_moments(parameter, step.gradient, moments,
                              settings.weight_decay == 0 && steps_by_rows(parameter, gradient, multiplier));
  return step;
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<AdamStep>& steps, double multiplier) {
  KernelLoop<AdamOperand> loop(steps.size());
  AdamNumbers numbers{};
  const AdamSettings* numbers_of_settings = nullptr;
  for (auto& s : steps) {
    if (!s.parameter.is_cpu()) continue;
    if (!numbers_of_settings || !(s.settings == *numbers_of_settings)) numbers = numbers_of(s.settings, multiplier);
    numbers_of_settings = &s.settings;
    const AdamOperand operand{.numbers = numbers,
                              .exp_avg = s.exp_avg.mutable_data_ptr(),
                              .exp_avg_sq = s.exp_avg_sq.mutable_data_ptr(),
                              .max_exp_avg_sq = s.settings.amsgrad ? s.max_exp_avg_sq.mutable_data_ptr() : nullptr};
    if (!s.rows) {
      loop.add(operand, adam_kernel, s.parameter, s.gradient, s.rounding_key);
      continue;
    }
    const auto bytes = static_cast<std::int64_t>(s.exp_avg.element_size()) * s.exp_avg.size(1);
    step_rows(s, operand, adam_kernel, moves_all_rows(s.settings), [&](AdamOperand& of_row, const StepRows::Row& row) {
      for (auto* const moments : {&of_row.exp_avg, &of_row.exp_avg_sq, &of_row.max_exp_avg_sq})
        if (*moments) *moments = first_of_table(*moments, row.moments, row.number, bytes);
    });
  }
  loop.run();
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<SgdStep>& steps, double multiplier) {
  KernelLoop<SgdOperand> loop(steps.size());
  for (auto& s : steps) {
    if (!s.parameter.is_cpu()) continue;
    const bool has_momentum = s.settings.momentum != 0;
    const SgdOperand operand{.numbers = numbers_of(s.settings, multiplier),
                             .momentum_buffer = has_momentum ? s.momentum_buffer.mutable_data_ptr() : nullptr};
    if (!s.rows) {
      loop.add(operand, sgd_kernel, s.parameter, s.gradient, s.rounding_key);
      continue;
    }
    const auto bytes = has_momentum ? s.momentum_buffer.size(1) * s.momentum_buffer.element_size() : 0;
    step_rows(s, operand, sgd_kernel, /*all=*/false, [&](SgdOperand& of_row, const StepRows::Row& row) {
      if (bytes > 0) of_row.momentum_buffer = first_of_table(of_row.momentum_buffer, row.moments, row.number, bytes);
    });
  }
  loop.run();
}

GRADACCUM_INLINE void step_on_cpu(const std::vector<Adam8bitStep>& steps, double multiplier) {
  KernelLoop<Adam8bitOperand> loop(steps.size(), eight_bit_block);
  for (auto& s : steps) {
    if (!s.parameter.is_cpu()) continue;
    const Adam8bitOperand operand{.numbers = numbers_of(s.settings, multiplier),
                                  .exp_avg = s.exp_avg.codes.mutable_data_ptr<std::uint8_t>(),
                                  .exp_avg_sq = s.exp_avg_sq.codes.mutable_data_ptr<std::uint8_t>(),
                                  .exp_avg_scale = s.exp_avg.scales.mutable_data_ptr<float>(),
                                  .exp_avg_sq_scale = s.exp_avg_sq.scales.mutable_data_ptr<float>()};
    if (!s.rows) {
      loop.add(operand, adam8bit_kernel, s.parameter, s.gradient, s.rounding_key);
      continue;
    }
    const auto width = s.exp_avg.codes.size(1), bytes_of_scales = width / eight_bit_block * 4;
    step_rows(s, operand, adam8bit_kernel, moves_all_rows(s.settings),
              [&](Adam8bitOperand& of_row, const StepRows::Row& row) {
                for (auto* const codes : {&of_row.exp_avg, &of_row.exp_avg_sq})
                  *codes = first_of_table(*codes, row.moments, row.number, width);
                for (auto* const scales : {&of_row.exp_avg_scale, &of_row.exp_avg_sq_scale})
                  *scales = first_of_table(*scales, row.moments, row.number, bytes_of_scales);
              });
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

  // The passes, in this order. Each must finish for the whole tensor before the next begins.
  void sum(AdafactorPiece& piece) const;
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
  std::int64_t extra_elements() const { return extra_elements_; }  ///< allocated besides the parameter's own

 private:
  void set_shape(const AdafactorStep& step);
  void cut();

  AdafactorSettings settings_;
  at::Tensor owner_, parameter_, gradient_, factors_;
  AdafactorOperand operand_;
  AdafactorKernels kernels_;
  std::vector<AdafactorPiece> pieces_;
  std::int64_t extra_elements_ = 0;
};

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

GRADACCUM_INLINE std::vector<Extent> DeviceOperand::cut() const {
  const auto all = whole();
  const bool lie_alike = is_plain(parameter) && is_plain(gradient) && same_order(parameter, gradient);
  if (all.size() <= most_copied || !lie_alike || row_major) return {all};
  std::vector<Extent> extents;
  for (std::int64_t from = 0; from < all.to; from += most_copied)
    extents.push_back({from, std::min(from + most_copied, all.to), /*whole=*/false});
  return extents;
}

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

GRADACCUM_INLINE void DeviceOperands::add(const DeviceOperand& operand, const Extent& extent) {
  Part part{
      .of = operand, .layout = {}, .parameter = extent.of(operand.parameter), .gradient = extent.of(operand.gradient)};
  // Rounds each part of a parameter with different random numbers.
  if (part.of.rounding_key) *part.of.rounding_key += static_cast<std::uint64_t>(extent.from);
  part.layout = extent.whole ? operand.layout() : plain_layout_of(part.parameter);
  if (!by_.on_host() && !factor_.defined()) {
    wide_factor_ = by_.on(part.parameter.device());
    factor_ = wide_factor_.to(at::toRealValueType(state_type(part.parameter)));
  }
  parts_.push_back(std::move(part));
}

GRADACCUM_INLINE void DeviceOperands::allocate(Scratch& scratch) {
  for (auto& part : parts_) {
    const auto copy_of = [&](at::ScalarType dtype) {  // a part of a complex tensor has real numbers
      return scratch.tensor(part.layout, part.parameter.is_complex() ? dtype : at::toRealValueType(dtype));
    };
    if (part.of.copies_parameter()) part.parameter_copy = copy_of(part.of.dtype_of_parameter());
    if (part.of.copies_gradient(!by_.is_one())) part.gradient_copy = copy_of(part.of.dtype_of_gradient());
    if (!part.of.rounding_key || part.of.by_kernel) continue;
    part.random_bits = scratch.tensor(part.layout, at::kInt);
    part.is_nan = scratch.tensor(part.layout, at::kBool);
  }
}

GRADACCUM_INLINE void DeviceOperands::read() {
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

GRADACCUM_INLINE std::vector<at::Tensor> DeviceOperands::parameters() const {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) all.push_back(as_real(part.stepped()));
  return all;
}

GRADACCUM_INLINE std::vector<at::Tensor> DeviceOperands::gradients() const {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) all.push_back(as_real(part.gradient_copy.defined() ? part.gradient_copy : part.gradient));
  return all;
}

GRADACCUM_INLINE void DeviceOperands::write_back() const {
  for (auto& part : parts_) {
    if (part.of.rounding_key && !part.of.by_kernel)
      round_stochastically_(part.parameter_copy, *part.of.rounding_key, part.random_bits, part.is_nan);
    detail::write_back(part.parameter, part.stepped());
  }
}

/// ATen's fused operation on lists of tensors of one device and dtype. It reads the step count from the device, but
/// does not advance it.
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

  void operator()(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs) const {
    const std::vector<at::Tensor> counts(parameters.size(), count_);
    using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                       double, double, double, double, double, bool, bool, const std::optional<at::Tensor>&,
                       const std::optional<at::Tensor>&);
    auto* const fused = by_.decoupled ? static_cast<Fused*>(at::_fused_adamw_) : static_cast<Fused*>(at::_fused_adam_);
    fused(parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, counts, by_.lr, by_.beta1, by_.beta2,
          by_.weight_decay, by_.eps, by_.amsgrad, /*maximize=*/false, std::nullopt, found_inf_);
  }

 private:
  AdamSettings by_;
  at::Tensor count_;
  std::optional<at::Tensor> found_inf_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<AdamStep>& steps,
                                      const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](const AdamSettings& by, at::Device device) {
    return [fused = FusedAdam(by, multiplier, device), amsgrad = by.amsgrad](
               const std::vector<StepPart<AdamStep>>& batch, at::TensorList p, at::TensorList g) {
      std::vector<at::Tensor> m, v, x;
      for (auto& [step, extent] : batch) {
        m.push_back(as_real(extent.of(step.exp_avg)));
        v.push_back(as_real(extent.of(step.exp_avg_sq)));
        if (amsgrad) x.push_back(as_real(extent.of(step.max_exp_avg_sq)));
      }
      fused(p, g, m, v, x);
    };
  });
}

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<SgdStep>& steps, const Multiplier& multiplier) {
  add_batches(plan, steps, multiplier, /*by_kernel=*/false, [&](const SgdSettings& by, at::Device device) {
    return [by, found_inf = found_inf_on(device, multiplier)](const std::vector<StepPart<SgdStep>>& batch,
                                                              at::TensorList p, at::TensorList g) {
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

/// Returns a 1-D view of a plain tensor in memory order.
GRADACCUM_INLINE at::Tensor flat(const at::Tensor& plain) { return plain.as_strided({plain.numel()}, {1}); }
GRADACCUM_INLINE at::Tensor in_blocks(const at::Tensor& plain, double fill) {
  const auto missing = blocks_of(plain) * eight_bit_block - plain.numel();
  return at::constant_pad_nd(flat(plain), {0, missing}, fill).view({-1, eight_bit_block});
}

GRADACCUM_INLINE const DynamicMap& map_of(bool is_signed) { return is_signed ? signed_map() : second_moment_map(); }

/// Returns the midpoints of successive values. The code of a number is the count of midpoints below it.
GRADACCUM_INLINE std::array<float, 256> middles_of(const DynamicMap& map) {
  std::array<float, 256> middles;
  middles.back() = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < 255; ++i) middles[i] = map.values[i] + (map.values[i + 1] - map.values[i]) / 2;
  if (map.edge[0] == 0) middles[0] = 0;  // second moments
  return middles;
}

/// Decodes and encodes moments on a device.
class Coding {
 public:
  Coding(bool is_signed, at::Device device) : zero_(is_signed ? zero_code : 0) {
    const auto& values = map_of(is_signed).values;
    const auto middles = middles_of(map_of(is_signed));
    const auto both = copied_to(
        device, at::stack({at::tensor(at::ArrayRef<float>(values)), at::tensor(at::ArrayRef<float>(middles))}));
    values_ = both[0];
    middles_ = both[1].slice(0, 0, 255);
  }

  at::Device device() const { return values_.device(); }

  /// Decodes whole blocks into `numbers`; `codes` may end inside the last one. `indices` is int32 scratch of equal
  /// size.
  void decode(const Codes& codes, at::Tensor numbers, const at::Tensor& indices) const {
    indices.fill_(zero_);
    indices.slice(0, 0, codes.codes.numel()).copy_(codes.codes);
    at::index_select_out(numbers, values_, 0, indices);
    numbers.view({-1, eight_bit_block}).mul_(codes.scales.unsqueeze(1));
  }

  /// Encodes `numbers`, and overwrites them. `indices` and `usable`, a bool for each block, are scratch.
  void encode(const at::Tensor& numbers, Codes codes, at::Tensor indices, at::Tensor usable) const {
    const auto blocks = numbers.view({-1, eight_bit_block});
    auto magnitudes = indices.view(at::kFloat);
    auto shaped = magnitudes.view({-1, eight_bit_block});
    at::abs_out(shaped, blocks);
    at::amax_out(codes.scales, shaped, {1});
    auto by = magnitudes.slice(0, 0, codes.scales.numel());
    at::reciprocal_out(by, codes.scales);
    at::ge_out(usable, codes.scales, std::numeric_limits<float>::min());
    by.masked_fill_(usable.logical_not_(), 0);
    blocks.mul_(by.unsqueeze(1));
    at::bucketize_out(indices, numbers, middles_, /*out_int32=*/true);
    codes.codes.copy_(indices.slice(0, 0, codes.codes.numel()));
  }

 private:
  std::int64_t zero_;
  at::Tensor values_, middles_;
};

GRADACCUM_INLINE at::Tensor indices_for(const at::Tensor& plain) {
  return at::empty({blocks_of(plain) * eight_bit_block}, plain.options().dtype(at::kInt));
}

GRADACCUM_INLINE at::Tensor decoded(const Codes& moments, bool is_signed) {
  const auto& like = moments.codes;
  const auto indices = indices_for(like), numbers = at::empty_like(indices, at::kFloat);
  if (like.numel() > 0) Coding(is_signed, like.device()).decode({flat(like), moments.scales}, numbers, indices);
  return at::empty_strided(like.sizes(), like.strides(), numbers.options())
      .copy_(numbers.as_strided(like.sizes(), like.strides()));
}

GRADACCUM_INLINE Codes encoded(const at::Tensor& numbers, bool is_signed) {
  auto codes = zero_codes(numbers, is_signed);
  if (numbers.numel() == 0) return codes;
  const auto blocks = in_blocks(numbers, 0).view({-1}).clone();
  Coding(is_signed, numbers.device())
      .encode(blocks, {flat(codes.codes), codes.scales}, indices_for(numbers),
              at::empty({blocks_of(numbers)}, numbers.options().dtype(at::kBool)));
  return codes;
}

GRADACCUM_INLINE Codes checked_state(const Codes& moments, const at::Tensor& parameter, bool is_signed,
                                     const char* name) {
  const auto like = plain_layout_of(parameter);
  if (!moments.codes.defined())
    return zero_codes(like.is_meta() ? at::empty_strided(like.sizes(), like.strides(), parameter.options()) : like,
                      is_signed);
  const auto& [codes, scales] = moments;
  TORCH_CHECK(state_type(parameter) == at::kFloat, "optimizer state: ", name, " must be of floats for a parameter in ",
              parameter.scalar_type(), ", got codes of 8 bits; the state was loaded for another model");
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

GRADACCUM_INLINE std::vector<Moments> moments_of(const Codes& codes, const at::Tensor& parameter, bool is_signed) {
  const auto width = parameter.numel() / parameter.size(0);
  return {{codes.codes, at::kByte, width, is_signed ? zero_code : 0},
          {codes.scales, at::kFloat, width / eight_bit_block}};
}

/// Returns dense moments. Dense scales are 1-D.
GRADACCUM_INLINE Codes dense_of(const Codes& moments, bool is_signed) {
  if (!moments.codes.defined() || !moments.codes.is_sparse()) return moments;
  return {dense_of(moments.codes, is_signed ? zero_code : 0), dense_of(moments.scales).flatten()};
}

GRADACCUM_INLINE Adam8bitStep adam8bit_step_of(const AdamSettings& settings, const at::Tensor& parameter,
                                               const at::Tensor& gradient, const Codes& exp_avg,
                                               const Codes& exp_avg_sq, const Multiplier& multiplier) {
  const bool by_rows = steps_by_rows(settings, parameter, gradient, multiplier) &&
                       parameter.numel() / parameter.size(0) % eight_bit_block == 0;
  const auto prepare = [&](const Codes& moments, bool is_signed, const char* name) {
    if (by_rows && (!moments.codes.defined() || moments.codes.is_sparse())) return moments;
    return checked_state(dense_of(moments, is_signed), parameter, is_signed, name);
  };
  Adam8bitStep step{settings, parameter, gradient, prepare(exp_avg, true, "exp_avg"),
                    prepare(exp_avg_sq, false, "exp_avg_sq")};
  if (!by_rows && gradient.is_sparse()) step.gradient = gradient.to_dense();
  if (!by_rows) return step;
  auto all = moments_of(step.exp_avg, parameter, true);
  for (auto& moments : moments_of(step.exp_avg_sq, parameter, false)) all.push_back(moments);
  step.rows = rows_of(parameter, gradient, all);
  step.exp_avg = {all[0].tensor, all[1].tensor};
  step.exp_avg_sq = {all[2].tensor, all[3].tensor};
  return step;
}

/// The step of a parameter, or of whole blocks of it, on a device.
class Adam8bitDeviceStep final : public DeviceStep {
 public:
  Adam8bitDeviceStep(const StepPart<Adam8bitStep>& part, const Multiplier& multiplier, const Coding& first,
                     const Coding& second)
      : operands_(multiplier),
        fused_(part.step.settings, multiplier, part.step.parameter.device()),
        is_skipped_(is_skipped_on(part.step.parameter.device(), multiplier)),
        first_(first),
        second_(second),
        exp_avg_(codes_of(part.step.exp_avg, part.extent)),
        exp_avg_sq_(codes_of(part.step.exp_avg_sq, part.extent)) {
    operands_.add(operand_of(part.step), part.extent);
  }

  void allocate(Scratch& scratch) override {
    operands_.allocate(scratch);
    const auto blocks = exp_avg_.scales.numel();
    indices_ = scratch.tensor(blocks * eight_bit_block, at::kInt);
    m_ = scratch.tensor(blocks * eight_bit_block, at::kFloat);
    v_ = scratch.tensor(blocks * eight_bit_block, at::kFloat);
    usable_ = scratch.tensor(blocks, at::kBool);
    if (!is_skipped_.defined()) return;
    fresh_.codes = scratch.tensor(exp_avg_.codes.numel(), at::kByte);
    fresh_.scales = scratch.tensor(blocks, at::kFloat);
  }

  void run() override {
    operands_.read();
    first_.decode(exp_avg_, m_, indices_);
    second_.decode(exp_avg_sq_, v_, indices_);
    const auto p = operands_.parameters(), g = operands_.gradients();
    const auto like_p = [&](const at::Tensor& moments) { return moments.as_strided(p[0].sizes(), p[0].strides()); };
    fused_(p, g, {like_p(m_)}, {like_p(v_)}, {});
    encode(first_, m_, exp_avg_);
    encode(second_, v_, exp_avg_sq_);
    operands_.write_back();
  }

 private:
  static Codes codes_of(const Codes& all, const Extent& extent) {
    const auto codes = flat(all.codes).narrow(0, extent.from, extent.size());
    return {codes, all.scales.narrow(0, extent.from / eight_bit_block, blocks_of(codes))};
  }

  /// Encodes moments, but keeps the old codes if the step is skipped, since encoding may change them.
  void encode(const Coding& coding, const at::Tensor& numbers, Codes& codes) const {
    if (!is_skipped_.defined()) return coding.encode(numbers, codes, indices_, usable_);
    coding.encode(numbers, fresh_, indices_, usable_);
    at::where_out(codes.codes, is_skipped_, codes.codes, fresh_.codes);
    at::where_out(codes.scales, is_skipped_, codes.scales, fresh_.scales);
  }

  DeviceOperands operands_;
  FusedAdam fused_;
  at::Tensor is_skipped_;
  Coding first_, second_;
  Codes exp_avg_, exp_avg_sq_, fresh_;
  at::Tensor indices_, m_, v_, usable_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<Adam8bitStep>& steps,
                                      const Multiplier& multiplier) {
  std::optional<Coding> first, second;
  for (auto& step : steps) {
    const auto device = step.parameter.device();
    if (!first || first->device() != device) {
      first.emplace(true, device);
      second.emplace(false, device);
    }
    for (auto& extent : operand_of(step).cut())
      plan.add(device,
               std::make_unique<Adam8bitDeviceStep>(StepPart<Adam8bitStep>{step, extent}, multiplier, *first, *second));
  }
}

/// The 0-dim factors of a step on a device, computed there such that a skipped step changes nothing.
struct AdafactorWeights {
  AdafactorWeights(const AdafactorSettings& settings, const Multiplier& multiplier, at::Device device,
                   at::ScalarType dtype)
      : by(settings), is_skipped(is_skipped_on(device, multiplier)) {
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
    keep_if_skipped(fresh2, 0);
    kept2 = (1 - fresh2).to(dtype);
    fresh2 = fresh2.to(dtype);
    step_size = step_size.to(dtype);
    kept1 = number(by.beta1).to(dtype);
    keep_if_skipped(kept1, 1);
  }

  bool fit(const AdafactorSettings& settings, at::Device device, at::ScalarType dtype) const {
    return settings == by && step_size.device() == device && step_size.scalar_type() == dtype;
  }

  /// Sets `factor` to `value`, which must leave everything unchanged, if the step is skipped.
  void keep_if_skipped(const at::Tensor& factor, double value) const {
    if (is_skipped.defined()) factor.masked_fill_(is_skipped, value);
  }

  AdafactorSettings by;
  at::Tensor is_skipped, fresh2, kept2, step_size, kept1;
};

/// One parameter's step on a device.
class AdafactorDeviceStep final : public DeviceStep {
 public:
  AdafactorDeviceStep(const AdafactorStep& step, const Multiplier& multiplier, const AdafactorWeights& weights)
      : step_(step), operands_(multiplier), weights_(weights) {
    operands_.add(operand_of(step), operand_of(step).whole());
  }

  void allocate(Scratch& scratch) override {
    const auto dtype = state_type(step_.parameter);
    const auto number = [&] {
      const auto one = scratch.tensor(1, dtype);
      return one.defined() ? one.squeeze(0) : one;
    };
    operands_.allocate(scratch);
    update_ = scratch.tensor(operands_.layout(), dtype);
    step_size_ = number();
    norm_ = number();
    if (step_.variance.defined()) return;
    row_ = scratch.tensor(step_.row_var, dtype);
    col_ = scratch.tensor(step_.col_var, dtype);
    means_ = scratch.tensor(step_.row_var.numel() / step_.row_var.size(-2), dtype);
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
    weights_.keep_if_skipped(update_, 0);
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
    weights_.keep_if_skipped(update_, 0);
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
    weights_.keep_if_skipped(norm_, 1);
    p.mul_(norm_);
  }

  at::Tensor with_momentum(const at::Tensor& update) const {
    if (!step_.exp_avg.defined()) return update;
    step_.exp_avg.mul_(weights_.kept1).add_(update, 1 - by().beta1);
    if (!weights_.is_skipped.defined()) return step_.exp_avg;
    return update.copy_(step_.exp_avg).masked_fill_(weights_.is_skipped, 0);
  }

  AdafactorStep step_;
  DeviceOperands operands_;
  AdafactorWeights weights_;
  at::Tensor update_, step_size_, norm_, row_, col_, means_;
};

GRADACCUM_INLINE void plan_aten_steps(StepPlan& plan, const std::vector<AdafactorStep>& steps,
                                      const Multiplier& multiplier) {
  std::optional<AdafactorWeights> weights;
  for (auto& step : steps) {
    const auto device = step.parameter.device();
    const auto dtype = state_type(step.parameter);
    if (!weights || !weights->fit(step.settings, device, dtype))
      weights.emplace(step.settings, multiplier, device, dtype);
    plan.add(device, std::make_unique<AdafactorDeviceStep>(step, multiplier, *weights));
  }
}

/// A batch of steps by our own kernels. Its launches, each of one mix of dtypes and at most a full table of tensors,
/// use the same scratch memory in turn.
class AdafactorKernelStep final : public DeviceStep {
 public:
  AdafactorKernelStep(std::vector<StepPart<AdafactorStep>> batch, const Multiplier& multiplier,
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
      if (found == open.end() || launches_[found->second].steps.size() == AdafactorTable::capacity) {
        open[types] = launches_.size();
        launches_.push_back({types});
      }
      auto& launch = launches_[open[types]];
      launch.steps.emplace_back(i, launch.bytes);
      const auto size = static_cast<std::int64_t>(at::elementSize(state_type(step.parameter)));
      launch.bytes += AdafactorMemory::bytes(shape_of(step), size);
    }
  }

  void allocate(Scratch& scratch) override {
    operands_.allocate(scratch);
    std::int64_t bytes = 0;
    for (auto& launch : launches_) bytes = std::max(bytes, launch.bytes);
    memory_ = scratch.tensor(bytes, at::kByte);
  }

  void run() override {
    operands_.read();
    const auto parameters = operands_.parameters(), gradients = operands_.gradients();
    {
      const c10::DeviceGuard guard(device_);
      for (auto& launch : launches_) {
        AdafactorTable table;
        for (auto& [i, offset] : launch.steps)
          table.add(
              entry(batch_[i].step, parameters[i], gradients[i], memory_.mutable_data_ptr<std::uint8_t>() + offset));
        kernels_->adafactor({batch_.front().step.settings, by_.pointers(), table}, launch.types,
                            native_stream(device_));
      }
    }
    operands_.write_back();
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
            .col_var = step.variance.defined() ? nullptr : data(step.col_var),
            .exp_avg = data(step.exp_avg),
            .memory = memory,
            .shape = shape_of(step),
            .rounding_key = step.rounding_key.value_or(0)};
  }

  std::vector<StepPart<AdafactorStep>> batch_;
  DeviceOperands operands_;
  const DeviceKernels* kernels_;
  at::Device device_;
  Multiplier by_;
  std::vector<Launch> launches_;
  at::Tensor memory_;
};

GRADACCUM_INLINE void add_kernel_steps(StepPlan& plan, const std::vector<AdafactorStep>& steps,
                                       const Multiplier& multiplier, const DeviceKernels& kernels) {
  for (auto& batch : batches_of(steps, /*multiplied=*/false, /*by_kernel=*/true)) {
    const auto device = batch.front().step.parameter.device();
    plan.add(device, std::make_unique<AdafactorKernelStep>(std::move(batch), multiplier, kernels));
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
