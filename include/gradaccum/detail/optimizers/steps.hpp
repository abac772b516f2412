// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/device/launch.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/kernels/steps.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

/// The steps of parameters. A step has the tensors that it reads and writes, and runs
///
/// - on the CPU by `step_on_cpu`: SIMD kernels in one parallel loop; a sparse gradient steps its own rows only;
/// - on a device by `plan_steps`, which adds to a `StepPlan`, per parameter, the library's kernels or, for steps of
///   single elements with float state, ATen's operations.
namespace gradaccum::detail {

struct ElementStep;
struct Multiplier;
class StepPlan;
class StepRows;

/// Describes the steps of a class to the rest of the library.
struct StepKind {
  std::size_t number_of_states;
  const char* const* names;                   ///< of the state's tensors
  std::size_t place;                          ///< in `Steps`
  bool (*equal)(const Plain&, const Plain&);  ///< compares settings
  Plain (*numbers)(const Plain&);             ///< returns what kernels need
  Kernel* (*kernel)(const OperandTypes& types, InstructionSet set) = {};
  /// For devices without a kernel: adds steps by ATen's fused operations, or runs the arithmetic on tensors.
  void (*plan_fused_steps)(StepPlan&, const std::vector<ElementStep>&, const Multiplier&) = {};
  void (*step_tensors)(const Plain& numbers, const at::Tensor& gradient, at::Tensor* changed) = {};
};

/// Describes a class of steps, but for the functions that run it.
template <class Step>
constexpr StepKind described() {
  static_assert(number_of_states<Step> <= most_states, "a step may have at most 4 tensors of state");
  return {.number_of_states = number_of_states<Step>,
          .names = std::data(Step::state),
          .place = place_in_list<Step>,
          .equal = [](const Plain& a, const Plain& b) { return a.as<Step>() == b.as<Step>(); },
          .numbers = [](const Plain& of) { return Plain(numbers_of(of.as<Step>())); }};
}

/// Returns the kind of a class in `Steps`.
template <class Step>
const StepKind& kind_in_list();
/// Returns the kind of a user's class: see optim/optimizer.hpp.
template <class Step>
const StepKind& kind_of_user();

/// A step of any class: its settings, by value, and their properties.
class AnyStep {
 public:
  template <class Step>
  AnyStep(const Step& step) : settings(step), states(number_of_states<Step>) {
    if constexpr (is_listed<Step>) {
      kind = &kind_in_list<Step>();
      if constexpr (requires { step.states(); }) states = step.states();
      if constexpr (requires { step.only_adds_gradient(); }) only_adds_gradient = step.only_adds_gradient();
    } else {
      kind = &kind_of_user<Step>();
    }
    if constexpr (requires { step.decays_gradient(); }) decays_gradient = step.decays_gradient();
    if constexpr (requires { step.changes_zeros(); }) changes_zeros = step.changes_zeros();
  }

  friend bool operator==(const AnyStep& a, const AnyStep& b) {
    return a.kind == b.kind && a.kind->equal(a.settings, b.settings);
  }
  Plain numbers() const { return kind->numbers(settings); }
  const char* name_of_state(std::size_t i) const { return kind->names[i]; }
  /// True for 8-bit moments: codes, and a scale for each block of them.
  bool is_coded() const { return kind->place == place_in_list<Adam8bitStep>; }

  const StepKind* kind;
  Plain settings;
  std::size_t states;               ///< the number of tensors in use
  bool decays_gradient = false;     ///< adds to the gradient, so that all elements get moments
  bool changes_zeros = false;       ///< changes elements that have neither a gradient nor moments
  bool only_adds_gradient = false;  ///< SGD: the parameter loses a multiple of the gradient
};

/// One parameter's step of single elements.
struct ElementStep {
  AnyStep settings;
  at::Tensor parameter, gradient;
  std::array<at::Tensor, most_states> state{};     ///< undefined if absent
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the state; nullptr: all

  /// Returns the memory of the state's tensors in use.
  std::array<void*, most_states> pointers() const {
    std::array<void*, most_states> all{};
    for (std::size_t i = 0; i < settings.states; ++i) all[i] = state[i].mutable_data_ptr();
    return all;
  }
  Kernel* kernel(at::ScalarType parameter_type, at::ScalarType gradient_type) const {
    return settings.kind->kernel({parameter_type, gradient_type, rounding_key.has_value()}, instruction_set());
  }
};

/// One parameter's step of Adafactor. The state is row-major.
struct AdafactorStep {
  AdafactorSettings settings;
  at::Tensor parameter, gradient, row_var, col_var, variance, exp_avg;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
};

/// Returns the factor as a number on the host. Synchronizes if a device knows a part of it.
double host_number(const Multiplier& multiplier);

/// Prepares a step that has the current state, whose tensors may be undefined. A sparse gradient steps only its rows if
/// possible; with 8-bit moments, only if rows are whole blocks.
void prepare(ElementStep& step, const Multiplier& multiplier);

/// Returns a tensor of the step's state as it is stored: after a step by rows a sparse tensor of these.
at::Tensor stored_state(const ElementStep& step, std::size_t i);

/// Runs one parameter's step by rows.
void step_rows(const ElementStep& step, Operand operand);

/// Runs the steps of parameters on the CPU in one parallel loop that reads and writes each element once (Adafactor a
/// few times), or in several loops if many parameters must be copied first. Leaves out steps on devices.
void step_on_cpu(const std::vector<ElementStep>& steps, double multiplier);
void step_on_cpu(const std::vector<AdafactorStep>& steps, double multiplier);

/// Adds steps by this library's kernels if they support the dtypes, else by ATen. Throws for steps that have neither,
/// with the name of the optimizer's class. Does not synchronize.
template <class Step>
void plan_steps(StepPlan& plan, const std::vector<Step>& steps, const Multiplier& multiplier, const char* optimizer);

/// Returns a launch without tensors.
StepLaunch launch_of(const AnyStep& settings, const DeviceMultiplier& by);

#ifdef GRADACCUM_COMPILED
const StepKind& kind_at(std::size_t place);
template <class Step>
const StepKind& kind_in_list() {
  return kind_at(place_in_list<Step>);
}
#endif

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/cpu_steps.ipp>
#include <gradaccum/impl/optimizers/device_steps.ipp>
#include <gradaccum/impl/optimizers/row_steps.ipp>
#endif
