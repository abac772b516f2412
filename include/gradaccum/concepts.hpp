// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <vector>

namespace gradaccum {

/// The result of an accumulator's `step()` or `flush()`. As a `bool`: true if parameters moved, or may have on a
/// device.
///
///     ga::GradAccumulator optimizer(sgd, {.steps = 4});
///     int skipped = 0;
///     for (auto& batch : batches) {
///       torch::mse_loss(model->forward(batch.data), batch.target).backward();
///       if (optimizer.step() == ga::StepResult::skipped) ++skipped;
///       optimizer.zero_grad();
///     }
class StepResult {
 public:
  /// Its enumerators are `ga::StepResult::stepped` and so on.
  enum class Kind {
    accumulated,    ///< the window is still open
    empty,          ///< closed without weight or gradients, so there was nothing to step with
    skipped,        ///< closed and skipped: the gradients had to be finite, and are not
    stepped,        ///< the parameters moved
    left_to_device  ///< the device skips the step if gradients are not finite, unknown to the host
  };
  using enum Kind;

  constexpr StepResult(Kind kind) : kind_(kind) {}  // NOLINT(google-explicit-constructor): one of the above
  /// True for `stepped` and `left_to_device`.
  constexpr operator bool() const {  // NOLINT(google-explicit-constructor): bool moved = optimizer.step()
    return kind_ == stepped || kind_ == left_to_device;
  }
  friend constexpr bool operator==(StepResult a, StepResult b) { return a.kind_ == b.kind_; }

 private:
  Kind kind_;
};

/// Steps the parameters that it owns, and clears their gradients: every `torch::optim::Optimizer` that needs no
/// closure, and a `GradAccumulator`.
template <class O>
concept optimizer = requires(O& o) {
  o.step();
  o.zero_grad();
  o.param_groups();
};

/// The base of an optimizer that multiplies by the deferred factor in its own pass, beside `torch::optim::Optimizer`:
/// it is then also found behind a `torch::optim::Optimizer&`.
///
/// `step(Gradients)` reads `raw()`, never `.grad`, and leaves the gradients as they are. If they were required to be
/// finite and are not, it moves nothing.
struct TakesGradients {
  virtual void step(Gradients gradients) = 0;
  /// Returns true if `step` leaves it to the device to check for finite gradients and to skip the step
  /// (`Gradients::judge_on_device`).
  virtual bool judges_on_device(const Gradients&) const { return false; }
  /// Returns true if the step of an element depends on no other, so that a process may step a part of a parameter.
  /// Parts are flat, and begin at a multiple of 4096 elements. `step` then gets the gradients of this process's parts,
  /// and their `norm()` is not the norm of the whole.
  virtual bool steps_by_elements() const { return false; }
  virtual ~TakesGradients() = default;
};

/// An optimizer that multiplies by the deferred factor in its own pass.
template <class O>
concept takes_gradients = optimizer<O> && requires(O& o, Gradients g) {
  o.step(g);
};

/// An optimizer that moves the parameters on some calls of `step()` only.
template <class O>
concept accumulating = optimizer<O> && requires(O& o) {
  { o.ready() } -> std::same_as<bool>;
  { o.gradients() } -> std::same_as<Gradients>;
};

namespace detail {

/// Returns the parameters of all groups.
template <class O>
std::vector<at::Tensor> parameters_of(O& optimizer) {
  std::vector<at::Tensor> all;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) all.push_back(parameter);
  return all;
}

}  // namespace detail
}  // namespace gradaccum
