// SPDX-License-Identifier: Apache-2.0
// Prepares steps, and runs those of a table by the rows that have had a gradient.
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>

#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/optimizers/eight_bit_moments.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE double host_number(const Multiplier& multiplier) {
  return multiplier.on_host() ? multiplier.host() : multiplier.on(at::kCPU).item<double>();
}

/// True if a step by rows is possible: on the CPU, for a plain table of real numbers, without a weight decay that is
/// added to the gradient, since it gives all rows moments. False for multipliers that do not keep zeros, with which the
/// dense step would change the other rows, too: NaN, infinity (also after conversion to float32, in which kernels
/// compute) and negative numbers, which give -0. Rows of 8-bit moments must be whole blocks.
GRADACCUM_INLINE bool steps_by_rows(const ElementStep& step, const Multiplier& multiplier) {
  const auto &parameter = step.parameter, &gradient = step.gradient;
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !parameter.is_cpu() || parameter.numel() == 0)
    return false;
  if (!is_plain(parameter) || !parameter.is_contiguous() || parameter.is_complex() || gradient.is_complex())
    return false;
  if (parameter.size(0) > std::numeric_limits<std::int32_t>::max()) return false;
  if (step.settings.is_coded() && parameter.numel() / parameter.size(0) % eight_bit_block != 0) return false;
  if (step.settings.decays_gradient) return false;
  const double by = host_number(multiplier);
  const double most =
      state_type(parameter) == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return detail::is_finite(by) && by <= most && !std::signbit(by);
}

/// A tensor of a parameter's state, and its layout in case there is none yet.
struct Moments {
  at::Tensor& tensor;
  at::ScalarType type;
  std::int64_t per_row;   ///< elements for each row of the parameter
  std::int64_t zero = 0;  ///< the value that represents zero
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
    auto sizes = parameter.sizes().vec();
    if (per_row != parameter.numel() / sizes[0]) sizes = {sizes[0], per_row};  // scales of 8-bit moments
    auto of_values = sizes;
    of_values[0] = count();
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

GRADACCUM_INLINE at::Tensor stored_state(const ElementStep& step, std::size_t i) {
  const bool by_rows = step.rows && i < step.settings.states;
  return by_rows ? step.rows->state_of(step.state[i], step.parameter) : step.state[i];
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

/// Prepares the rows of float state.
GRADACCUM_INLINE void prepare_rows(ElementStep& step) {
  const auto& parameter = step.parameter;
  std::vector<Moments> moments;
  for (std::size_t i = 0; i < step.settings.states; ++i) {
    auto& state = step.state[i];
    const auto* const name = step.settings.name_of_state(i);
    TORCH_CHECK(!state.defined() || !state.is_sparse() ||
                    (state.sparse_dim() == 1 && state.sizes() == parameter.sizes() && state.is_cpu()),
                "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
                ", got rows of ", state.sizes());
    if (state.defined() && !state.is_sparse()) state = checked_state(state, parameter, name);
    moments.push_back({state, state_type(parameter), parameter.numel() / parameter.size(0)});
  }
  step.rows = rows_of(parameter, step.gradient, moments);
}

/// Prepares 8-bit moments.
GRADACCUM_INLINE void prepare_codes(ElementStep& step, bool by_rows) {
  const auto& parameter = step.parameter;
  auto& state = step.state;
  for (std::size_t i = 0; i < 2; ++i) {
    const bool is_signed = i == 0;
    const Codes moments{state[i], state[2 + i]};
    if (by_rows && !(moments.codes.defined() && !moments.codes.is_sparse())) continue;
    auto checked = checked_state(dense_of(moments, is_signed), parameter, is_signed, Adam8bitStep::state[i]);
    state[i] = std::move(checked.codes);
    state[2 + i] = std::move(checked.scales);
  }
  if (!by_rows) return;
  const auto width = parameter.numel() / parameter.size(0), scales = width / eight_bit_block;
  step.rows = rows_of(parameter, step.gradient,
                      {{state[0], at::kByte, width, zero_code},
                       {state[1], at::kByte, width},
                       {state[2], at::kFloat, scales},
                       {state[3], at::kFloat, scales}});
}

GRADACCUM_INLINE void prepare(ElementStep& step, const Multiplier& multiplier) {
  const bool by_rows = steps_by_rows(step, multiplier);
  const auto used = step.settings.states;
  if (step.settings.is_coded())
    prepare_codes(step, by_rows);
  else if (by_rows)
    prepare_rows(step);
  else
    for (std::size_t i = 0; i < used; ++i)
      step.state[i] = checked_state(dense_of(step.state[i]), step.parameter, step.settings.name_of_state(i));
  for (auto i = used; i < most_states; ++i) step.state[i] = dense_of(step.state[i]);
  if (!by_rows && step.gradient.is_sparse()) step.gradient = step.gradient.to_dense();
}

/// Returns the address from which kernels count: the table's first, if the `index`-th row in memory is its `row`-th.
template <class T>
T* first_of_table(T* memory, std::int64_t index, std::int64_t row, std::int64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return reinterpret_cast<T*>(address + static_cast<std::uintptr_t>((index - row) * bytes));
}

GRADACCUM_INLINE void step_rows(const ElementStep& step, Operand operand) {
  const auto& parameter = step.parameter;
  auto gradient = in_reach(step.rows->gradient(), parameter, operand.multiplier);
  gradient = gradient.to(gradient_type(parameter, gradient)).contiguous();
  const auto width = parameter.numel() / parameter.size(0);
  const auto none = at::zeros({width}, gradient.options());
  auto* const kernel = step.kernel(parameter.scalar_type(), gradient.scalar_type());
  operand.parameter = parameter.mutable_data_ptr();
  const auto bytes = static_cast<std::int64_t>(gradient.element_size()) * width;
  const void* const values = gradient.const_data_ptr();
  const void* const zeros = none.const_data_ptr();
  const auto states = step.settings.states;
  step.rows->run(step.settings.changes_zeros, [&](const StepRows::Row& row) {
    auto of_row = operand;
    of_row.gradient = row.gradient < 0 ? first_of_table(zeros, 0, row.number, bytes)
                                       : first_of_table(values, row.gradient, row.number, bytes);
    for (std::size_t i = 0; i < states; ++i) {
      const auto per_row = step.state[i].element_size() * step.state[i].size(1);
      of_row.state[i] = first_of_table(operand.state[i], row.moments, row.number, per_row);
    }
    kernel(of_row, row.number * width, width);
  });
  write_back(parameter, parameter);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
