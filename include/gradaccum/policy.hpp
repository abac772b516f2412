// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: training

// Declarations of policies need these headers, directly or through them.
#include <gradaccum/archive.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace gradaccum {

class TrainerBase;
struct Validation;

/// The report of one window.
struct Step {
  std::int64_t update = 0;         ///< updates so far, including this one if it was made
  std::int64_t epoch = 0;          ///< counted from 0
  std::int64_t batches = 0;        ///< batches of this rank in the window
  std::int64_t micro_batches = 0;  ///< micro-batches in the window, of all ranks; more if `FitMemory` splits batches
  std::int64_t samples = 0;        ///< samples in the window, of all ranks
  double items = 0;                ///< items that the gradient is the mean over; by default samples
  bool moved = false;              ///< the parameters were updated; false: the window was skipped
  bool overflowed = false;         ///< skipped because gradients were not finite, with a loss scaler
  bool rejected = false;           ///< skipped because a policy called `Gradients::reject()`
  at::Tensor loss = {};            ///< mean over the window's items, detached: 0-dim float64, on the losses' device
  at::Tensor grad_norm = {};       ///< norm before clipping, 0-dim; undefined if no policy measures it
  double lr = 0;                   ///< rate of the first parameter group in this step; NaN if unknown
};

// Each hook has a concept, such as hook::before_step<P>, that is true if P has a member of that name with any
// signature: in a class derived from P and from another one with that member, the name is ambiguous. The call requires
// the right signature, so that a wrong one is a compile error rather than a hook that never runs.
#define GRADACCUM_HOOK(name, signature, form)                                 \
  namespace hook {                                                            \
  struct name##_probe {                                                       \
    int name;                                                                 \
  };                                                                          \
  template <class P>                                                          \
  struct name##_both : P, name##_probe {};                                    \
  template <class P>                                                          \
  concept name = !requires {                                                  \
    &name##_both<P>::name;                                                    \
  };                                                                          \
  }                                                                           \
  namespace hooks {                                                           \
  struct name {                                                               \
    template <class P>                                                        \
    static constexpr bool in = hook::name<P>;                                 \
    template <class P, class... Arguments>                                    \
    static decltype(auto) call(P& policy, Arguments&... a) {                  \
      constexpr bool callable = requires { policy.name(a...); };              \
      static_assert(callable, "policy: " #name " must be callable as " form); \
      if constexpr (callable) return policy.name(a...);                       \
    }                                                                         \
  };                                                                          \
  }

#include <gradaccum/detail/training/hooks.inl>
#undef GRADACCUM_HOOK

namespace detail {
class AnyPolicy;
}

/// A policy that runs in a Trainer: what `start` of the library's policies returns.
class PolicyRun {
 public:
  virtual ~PolicyRun() = default;

 private:
  friend class detail::AnyPolicy;
  PolicyRun() = default;
};

namespace detail {

/// True for a policy of the library whose run, the object that `start` returns, has the hooks. The Trainer
/// calls `start` once the `attach` of all policies was called.
template <class P>
concept has_run = requires {
  { &P::start } -> std::convertible_to<std::shared_ptr<PolicyRun> (P::*)(TrainerBase&)>;
};

/// True for options of the library that a Trainer holds as their `Running`, with results that `Trainer::policy` gives
/// access to, or with hooks.
template <class P>
concept has_running = std::same_as<typename P::Running::Options, P>;

/// True for a class derived from such options, which has no `Running` of its own.
template <class P>
concept derives_from_running = !has_running<P> && requires {
  typename P::Running::Options;
}
&&std::derived_from<P, typename P::Running::Options> && !std::derived_from<P, typename P::Running>;

}  // namespace detail

namespace hooks {

/// True for a class with a hook other than `state`, which many other classes have, too.
template <class P>
inline constexpr bool any_in =
#define GRADACCUM_HOOK(name, signature, form) (!std::is_same_v<name, state> && name::in<P>) ||
#include <gradaccum/detail/training/hooks.inl>
#undef GRADACCUM_HOOK
    false;

}  // namespace hooks

/// A class that a Trainer calls during training, through members that have the names of hooks.
///
///     struct GradientNoise {
///       double sigma = 0.01;
///       void before_step(ga::Gradients& gradients) const {
///         for (auto& gradient : gradients.values()) gradient.add_(torch::randn_like(gradient), sigma);
///       }
///     };
///     ga::Trainer trainer(*model, sgd, [](auto& net, auto& batch) { return net.forward(batch.data).square().mean(); },
///                         ga::Accumulate{.steps = 4}, GradientNoise{.sigma = 1e-3});
///     trainer.fit(batches);
///
// clang-format off
/// | hook | when it is called, and its task |
/// |---|---|
/// | `attach(TrainerBase&)` | once, in the trainer's constructor; `auto&` receives the Trainer itself |
/// | `on_epoch_begin(epoch)`, `on_epoch_end(epoch)` | at the start and end of an epoch of `fit` |
/// | `fit_scope()` | returns a guard that is held while `fit` runs |
/// | `forward_scope()` | returns a guard that is held while the objective runs, in training and evaluation |
/// | `before_backward(Loss&)` | may change the seed of the backward pass, but not the loss |
/// | `ready()` | before each backward pass: returns whether it may fill the window, which closes if all agree |
/// | `after_backward(Gradients&)` | may read the sums so far; the window is still open |
/// | `before_close()` | before the window closes: gradients are complete, and activations are freed. With `OptimizerInBackward` this and the next hook are called before the backward pass that fills the window |
/// | `scale_gradients(Factor&)` | adds deferred factors, which are write-only: the order of policies does not matter |
/// | `before_step(Gradients&)` | reads the final gradients (mean, unscaled) by `norm()`, reads or changes them by `values()`, or rejects the window by `reject()` |
/// | `after_window(const Step&)` | after the window, stepped or skipped |
/// | `after_step(const Step&)` | after an update of the parameters |
/// | `before_boundary()` | in `fit`, after all hooks above: between two micro-batches, and at the end of an epoch. Evaluate here, and call `TrainerBase::validated` |
/// | `on_validation(const Validation&)` | receives the result of an evaluation |
/// | `at_boundary()` | in `fit`, after `before_boundary` of all policies. Save states here |
/// | `others_continue()` | in `fit`, when this rank has no more batches in the epoch: returns whether other ranks have some, so that this rank joins their next window. Called again after each. Hooks of a policy that has it come before those of the others |
/// | `state(Archive&)` | saves and loads the policy's state; needs a member `std::string_view name`, static or not |
// clang-format on
///
/// The class must not be final. A hook with a wrong signature does not compile; a misspelt name is not detected, unless
/// you check it by `static_assert(ga::hook::before_step<GradientNoise>)`.
template <class P>
concept policy =
    std::is_class_v<P> && !std::is_final_v<P> && (hooks::any_in<P> || detail::has_run<P> || detail::has_running<P>);

}  // namespace gradaccum
