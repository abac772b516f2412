// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A parameter's state in an optimizer that LibTorch lacks: a step count and named tensors, undefined if absent.
class OwnParamState : public torch::optim::OptimizerParamState {
  TORCH_ARG(std::int64_t, step) = 0;

 public:
  virtual std::vector<std::pair<std::string, at::Tensor*>> tensors() = 0;
  /// Throws if the state does not fit the parameter.
  virtual void check(const at::Tensor& parameter) const = 0;

  void serialize(torch::serialize::OutputArchive& archive) const override;
  void serialize(torch::serialize::InputArchive& archive) override;
};

/// Access to an optimizer's states as named tensors, for LibTorch's classes and our own.

/// Returns an empty state of the class that LibTorch's `optimizer` uses; nullptr if that class is unknown.
std::unique_ptr<torch::optim::OptimizerParamState> new_state_of(const torch::optim::Optimizer& optimizer);

/// Makes states that are kept by rows dense until the next step, as files store them.
void make_dense(const torch::optim::Optimizer& optimizer);

/// Calls `see` with each state tensor as the optimizer keeps it.
void for_each_state_tensor(const torch::optim::Optimizer& optimizer, c10::function_ref<void(const at::Tensor&)> see);

/// Returns all states by name. The tensors are the optimizer's own, or dense copies if it keeps rows.
NamedTensors named_state_of(const torch::optim::Optimizer& optimizer, const NameOf& name_of);

/// Removes a count from `tensors` and returns it; nullopt if there is none. Throws unless it is a whole number >= 0.
std::optional<std::int64_t> taken_count(NamedTensors& tensors, const std::string& name);

/// Moves the states of all parameters from `tensors` into copies of `fresh`, and checks them. Returns a function that
/// makes them the optimizer's. Parameters without a state start afresh; if `lenient`, they keep their old state, as do
/// those whose new state does not fit.
std::function<void()> take_states(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamState& fresh,
                                  const NameOf& name_of, NamedTensors& tensors, bool lenient);

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
std::shared_ptr<const StepRows> prepare_moments(const at::Tensor& parameter, at::Tensor& gradient,
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

class Shards;

/// Throws if the optimizer's state cannot be saved, or if one of its parameters has no name.
void check_has_named_state(torch::optim::Optimizer& optimizer, const NamedParameters& parameters);

/// Saves or loads the state of LibTorch's and our own optimizers by parameter name, and the options of their groups.
/// With `shards`, saves only this process's pieces. Loads a state that was saved whole or in pieces.
void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                       Shards* shards = nullptr);

/// The state of an optimizer that steps shards, with names such as `exp_avg.0.weight[4096:8192 of 64x128]`.

/// Returns this rank's pieces with their names.
NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters);

/// Returns the part of a state that belongs to this rank's pieces. The state may have been saved whole or in pieces.
/// Throws for tensors of unknown parameters or other shapes; if `lenient`, omits them.
NamedTensors own_part(NamedTensors state, const Shards& shards, const NamedParameters& parameters, bool lenient);

/// Joins the pieces of a state, for an optimizer that is not sharded.
NamedTensors whole_state(NamedTensors state);

/// The index of each of an optimizer's parameters, counted across its groups. `check` throws if one is listed twice, as
/// it would be stepped twice at the same time, and is cheap while the list is unchanged.
class DistinctParameters {
 public:
  void check(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups);
  std::size_t place_of(const at::Tensor& parameter) const { return places_.at(parameter.unsafeGetTensorImpl()); }

 private:
  std::vector<const void*> known_;
  std::unordered_map<const void*, std::size_t> places_;
};

/// The keys of the random numbers that round bfloat16 parameters. They depend on the seed, the parameter's index in the
/// optimizer and the number of its rounded steps, but not on threads or other parameters.
class StochasticRounding {
 public:
  void seed(std::uint64_t seed) { seed_ = seed; }
  bool is_on() const { return seed_.has_value(); }
  bool concerns(const at::Tensor& parameter) const { return seed_ && parameter.scalar_type() == at::kBFloat16; }

  /// Returns the key for the next step of the `place`-th parameter, and counts the step. Requires `concerns`.
  std::uint64_t next_key(std::size_t place);

  /// The number of rounded steps of each parameter. This is state to save; the seed is set by the program.
  const std::vector<std::int64_t>& steps() const { return steps_; }
  std::int64_t steps_of(std::size_t place) const { return place < steps_.size() ? steps_[place] : 0; }
  void set_steps(std::vector<std::int64_t> steps);

 private:
  std::optional<std::uint64_t> seed_;
  std::vector<std::int64_t> steps_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/param_states.ipp>
#endif
