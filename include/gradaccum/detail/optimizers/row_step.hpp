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

/// Steps by sparse gradients: what the dense step does, to the bit, in the rows that it would move. Moments exist for
/// rows that a gradient has ever had, as a sparse tensor keeps them; those of all others are zero.

/// Whether such a step can be taken: on the CPU, of a plain table of real numbers. A multiplier that makes something
/// else of zeros, by which the dense step would move the other rows, too, takes that: NaN, infinity (also as float32,
/// in which kernels compute) and what is negative, which makes -0 of them.
bool steps_by_rows(const at::Tensor& parameter, const at::Tensor& gradient, const Multiplier& multiplier);

/// A tensor of a parameter's state, and what it is of where there is none yet.
struct Moments {
  at::Tensor tensor;
  at::ScalarType type;
  std::int64_t per_row;   ///< elements of each row of the parameter
  std::int64_t zero = 0;  ///< what stands for zero
};

/// Sparse moments as the dense step has them, one row after another; any other as they are. Where somebody else's have
/// a row several times, as LibTorch's SGD may, that is a sum.
at::Tensor dense_of(const at::Tensor& moments, std::int64_t zero = 0);

/// The rows of a table that one step reads.
class StepRows {
 public:
  /// `moments`: all that its parameter has.
  StepRows(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Moments>& moments);

  /// The gradient's, one after another, without duplicates.
  const at::Tensor& gradient() const { return gradient_; }
  /// Those of the rows that have some, and zeros for rows that are new; behind them memory for `run`.
  at::Tensor values_of(const Moments& moments) const;
  /// Such values as a tensor of the parameter's state, sparse.
  at::Tensor state_of(const at::Tensor& values, const at::Tensor& parameter) const;

  /// Where a row's memory begins, in rows: of its moments, and of its gradient, negative where it has none.
  struct Row {
    std::int64_t number, moments, gradient;
  };
  /// On LibTorch's threads. `all`: rows without moments, too; they get some that are zero, and must leave them so.
  void run(bool all, c10::function_ref<void(const Row&)> body) const;

 private:
  static constexpr std::int64_t tasks = 64;

  std::int64_t count() const { return rows_.size(0); }

  at::Tensor rows_, gradient_;                  // int64: in the order in which they were met
  std::int64_t had_ = 0;                        // of them, those that had moments before
  std::vector<std::int32_t> moments_, values_;  // of each row of the table: its place in `rows_`, and in the gradient
};

/// The rows of a step, whose moments become their values.
std::shared_ptr<const StepRows> rows_of(const at::Tensor& parameter, const at::Tensor& gradient,
                                        std::vector<Moments>& moments);

/// Moments of floats, one for each number of the parameter.
struct FloatMoments {
  at::Tensor& tensor;
  const char* name;
};
/// Gets moments ready for a step: by rows, which it gives; or of all numbers, for which a gradient becomes dense.
std::shared_ptr<const StepRows> settle(const at::Tensor& parameter, at::Tensor& gradient,
                                       const std::vector<FloatMoments>& moments, bool by_rows);

/// Moments that a step was settled with, as its parameter's state.
template <class Step>
at::Tensor kept_moments(const Step& step, const at::Tensor& moments) {
  return step.rows ? step.rows->state_of(moments, step.parameter) : moments;
}

/// As kernels want it, who count from the first element of a table: where that would lie if this row, the `row`-th of
/// the table, lay in it.
template <class T>
T* first_of_table(T* memory, std::int64_t place, std::int64_t row, std::int64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return reinterpret_cast<T*>(address + static_cast<std::uintptr_t>((place - row) * bytes));
}

/// Takes the step of one parameter. `point(operand, row)` gives the operand its moments.
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
