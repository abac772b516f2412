// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/adafactor_tensor.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

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

}  // namespace gradaccum::detail
