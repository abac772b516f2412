// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: optimizers

#include <gradaccum/detail/kernels/own_kernels.hpp>
#include <gradaccum/detail/optimizers/own_optimizer.hpp>
#include <gradaccum/detail/optimizers/tensor_vector.hpp>

namespace gradaccum::optim {

/// The base of an optimizer of your own: one pass over memory, which also applies a window's deferred factor. `Lion`
/// is made of it, too:
///
///     ga::optim::Lion lion(model->parameters(), ga::optim::LionOptions(1e-4));
///     ga::GradAccumulator optimizer(lion, {.steps = 2});
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// It needs three classes, of which the guide (docs/optimizers.md) has an example:
///
/// - A step: a struct of plain numbers, at most 112 bytes, with `operator==`, the names of up to 4 tensors of state, as
///   in `static constexpr const char* state[] = {"exp_avg"}`, and the arithmetic of one element: a template
///   `operator()(Vector& parameter, const Vector& gradient, Vector&... state) const`. Vectors are float, or double for
///   double parameters, and have + - * /, `multiply_add(a, b, c)`, `square_root`, `larger`, `smaller`, `magnitude`,
///   `sign` and `Vector::all(number)`.
/// - The options of a group: a struct that derives from `OwnOptions`, with `lr()`, and constructors from a rate and
///   from nothing. A function `check() const` may throw for wrong ones.
/// - The class, with a `name` and `next_step(options)`, which returns the step. If the step has a member `step`, the
///   state counts steps, and `next_step(options, state)` sets it to `state.step() + 1`.
///
/// For sparse gradients a step may have functions that say more about its numbers: `decays_gradient()`, if all elements
/// get a state even without a gradient; `changes_zeros()`, if elements with neither gradient nor state change.
///
/// @note On the CPU it uses the instructions of the program's target, on LibTorch's threads. On devices ATen's
/// operations run the arithmetic, with memory for intermediate results. Does not synchronize, but for 4 bytes with loss
/// scaling if it counts steps.
template <class Derived, class Options, class Step>
class ElementwiseOptimizer
    : public ElementOptimizer<Derived, OwnGroups<Derived, Options, ElementState<Step>>, Options, ElementState<Step>> {
  using Base = ElementOptimizer<Derived, OwnGroups<Derived, Options, ElementState<Step>>, Options, ElementState<Step>>;

 public:
  using Base::Base;

  /// Called for new options and before each step.
  static void check(const Options& options) {
    if constexpr (requires { options.check(); }) options.check();
  }
  bool judges_on_device(const Gradients& gradients) const override {
    return !ElementState<Step>::counts_steps && Base::judges_on_device(gradients);
  }
};

}  // namespace gradaccum::optim

namespace gradaccum::detail {

template <class Step>
const StepKind& kind_of_user() {
  static constexpr auto kind = [] {
    auto of_step = described<Step>();
    of_step.kernel = [](const OperandTypes& types, InstructionSet) {
      return own_kernels::Kernels{types}.template step<Step>();
    };
    of_step.step_tensors = step_tensors<Step>;
    return of_step;
  }();
  return kind;
}

}  // namespace gradaccum::detail
