// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <vector>

namespace gradaccum {

/// What a `step()` or `flush()` of an accumulator came to. As a `bool`: the parameters moved, or a device is to find
/// out whether they do.
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
    accumulated,    ///< the window goes on
    empty,          ///< it closed without weight or gradients: there was nothing to step with
    skipped,        ///< it closed, and was left out: its gradients had to be finite, and are not
    stepped,        ///< the parameters moved
    left_to_device  ///< the device leaves the step out if gradients are not finite, and the host does not know
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

/// Steps the parameters that it owns, and clears their gradients. Every `torch::optim::Optimizer` that needs no closure
/// is one; so is a `GradAccumulator`.
template <class O>
concept optimizer = requires(O& o) {
  o.step();
  o.zero_grad();
  o.param_groups();
};

/// What an optimizer derives from, beside `torch::optim::Optimizer`, to multiply by the deferred factor in its own
/// pass; so it is also found behind a `torch::optim::Optimizer&`.
///
/// `step(Gradients)` reads `raw()`, never `.grad`; leaves the gradients as they are; and where they were required to be
/// finite and are not, moves nothing.
struct TakesGradients {
  virtual void step(Gradients gradients) = 0;
  /// `step` will leave the question whether they are finite to the device, which leaves out the step itself
  /// (`Gradients::judge_on_device`).
  virtual bool judges_on_device(const Gradients&) const { return false; }
  /// The step of an element depends on no other: part of a parameter may be stepped alone, by another process say.
  /// Parts are flat, and begin at a multiple of 4096 elements. `step` gets the gradients of this process's parts alone
  /// then, of which `norm()` is another than of all.
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

/// Of all groups.
template <class O>
std::vector<at::Tensor> parameters_of(O& optimizer) {
  std::vector<at::Tensor> all;
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) all.push_back(parameter);
  return all;
}

}  // namespace detail
}  // namespace gradaccum
