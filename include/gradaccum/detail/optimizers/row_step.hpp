// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernels.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Steps by sparse gradients, bitwise equal to the dense step in the rows that it would change. Moments are sparse
/// tensors with the rows that have ever had a gradient; the moments of all other rows are zero.

/// True if a step by rows is possible: on the CPU, for a plain table of real numbers. False for multipliers that do not
/// keep zeros, with which the dense step would change the other rows, too: NaN, infinity (also after conversion to
/// float32, in which kernels compute) and negative numbers, which give -0.
bool steps_by_rows(const at::Tensor& parameter, const at::Tensor& gradient, const Multiplier& multiplier);

/// A tensor of a parameter's state, and its layout in case there is none yet.
struct Moments {
  at::Tensor tensor;
  at::ScalarType type;
  std::int64_t per_row;   ///< elements for each row of the parameter
  std::int64_t zero = 0;  ///< the value that represents zero
};

/// Returns sparse moments as a dense, row-major tensor, others unchanged. Sums duplicate rows (of LibTorch's SGD).
at::Tensor dense_of(const at::Tensor& moments, std::int64_t zero = 0);

/// The rows of a table that one step reads.
class StepRows {
 public:
  /// Collects the rows. `moments` must be all that the parameter has.
  StepRows(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Moments>& moments);

  /// The values of the gradient's rows, without duplicates.
  const at::Tensor& gradient() const { return gradient_; }
  /// Returns the rows' moments, zeros for new rows, followed by scratch rows for `run`.
  at::Tensor values_of(const Moments& moments) const;
  /// Returns the rows' values as a sparse tensor of the parameter's state.
  at::Tensor state_of(const at::Tensor& values, const at::Tensor& parameter) const;

  /// A row's number in the table, its index in the moments, and that in the gradient, or a negative number.
  struct Row {
    std::int64_t number, moments, gradient;
  };
  /// Calls `body` for each row on LibTorch's threads; with `all`, also for rows without moments, whose zeros must stay.
  void run(bool all, c10::function_ref<void(const Row&)> body) const;

 private:
  static constexpr std::int64_t tasks = 64;

  std::int64_t count() const { return rows_.size(0); }

  at::Tensor rows_, gradient_;                  // row numbers (int64) in the order of first use; the gradient's values
  std::int64_t had_ = 0;                        // number of rows that had moments before
  std::vector<std::int32_t> moments_, values_;  // by row of the table: its index in `rows_` and in the gradient, or -1
};

/// Returns a step's rows, and replaces the moments by the rows' values.
std::shared_ptr<const StepRows> rows_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                        std::vector<Moments>& moments);

/// Float moments, one for each number of the parameter.
struct FloatMoments {
  at::Tensor& tensor;
  const char* name;
};
/// Prepares moments for a step by rows, which it returns; or for a dense step, for which it makes the gradient dense.
std::shared_ptr<const StepRows> settle(const at::Tensor& parameter, at::Tensor& gradient,
                                       const std::vector<FloatMoments>& moments, bool by_rows);

/// Returns a step's moments in the form of the parameter's state.
template <class Step>
at::Tensor kept_moments(const Step& step, const at::Tensor& moments) {
  return step.rows ? step.rows->state_of(moments, step.parameter) : moments;
}

/// Returns the address that the table's first element would have if the `place`-th row in memory were the table's
/// `row`-th. Kernels count from a table's first element.
template <class T>
T* first_of_table(T* memory, std::int64_t place, std::int64_t row, std::int64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return reinterpret_cast<T*>(address + static_cast<std::uintptr_t>((place - row) * bytes));
}

/// Runs one parameter's step by rows. `point(operand, row)` sets the operand's moments.
template <class Operand, class KernelFor, class Point>
void take_rows(const StepRows& rows, Operand operand, const KernelFor& kernel_for, const at::Tensor& parameter,
               std::optional<std::uint64_t> rounding_key, bool all, const Point& point) {
  auto gradient = rows.gradient();
  if (at::elementSize(gradient.scalar_type()) > at::elementSize(state_type(parameter)))
    gradient = gradient.mul(std::exchange(operand.numbers.multiplier, 1.0));
  const bool same = gradient.scalar_type() == parameter.scalar_type();
  gradient = gradient.to(same ? parameter.scalar_type() : state_type(parameter)).contiguous();
  const auto width = parameter.numel() / parameter.size(0);
  const auto none = at::zeros({width}, gradient.options());
  const auto kernel =
      kernel_for(parameter.scalar_type(), gradient.scalar_type(), instruction_set(), rounding_key.has_value());
  operand.parameter = parameter.mutable_data_ptr();
  operand.rounding_key = rounding_key.value_or(0);
  const auto bytes = static_cast<std::int64_t>(gradient.element_size()) * width;
  const void* const values = gradient.const_data_ptr();
  const void* const zeros = none.const_data_ptr();
  rows.run(all, [&](const StepRows::Row& row) {
    Operand of_row = operand;
    of_row.gradient = row.gradient < 0 ? first_of_table(zeros, 0, row.number, bytes)
                                       : first_of_table(values, row.gradient, row.number, bytes);
    point(of_row, row);
    kernel(of_row, row.number * width, width);
  });
  write_back(parameter, parameter);
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/row_step.ipp>
#endif
