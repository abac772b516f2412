// SPDX-License-Identifier: Apache-2.0
#pragma once

// Policies are declared with these, and with what these include.
#include <gradaccum/archive.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <type_traits>

namespace gradaccum {

class TrainerBase;
struct Validation;

/// The report of one window.
struct Step {
  std::int64_t update = 0;         ///< updates so far, this one included if it moved the parameters
  std::int64_t epoch = 0;          ///< counted from 0
  std::int64_t batches = 0;        ///< in the window, of this process
  std::int64_t micro_batches = 0;  ///< as many, but where `FitMemory` divides batches
  std::int64_t samples = 0;        ///< rows of its batches
  double items = 0;                ///< what the gradient is the mean over: of losses that tell none, their samples
  bool moved = false;              ///< the parameters moved; else the window was skipped
  bool overflowed = false;         ///< skipped, for gradients that are not finite with a loss scaler at work
  at::Tensor loss = {};            ///< mean over the window's items, detached: 0-dim float64, on the losses' device
  at::Tensor grad_norm = {};       ///< before clipping, 0-dim; undefined where nobody clipped by the norm
  double lr = 0;                   ///< of the first parameter group, in this step; NaN if the optimizer does not tell
};

// Each hook has a concept, hook::before_step<P>: "P has a member of that name", whatever its signature. It is found by
// deriving also from a class that has one, which makes the name ambiguous. Its call requires the signature, so that a
// hook which is slightly wrong is an error, and not one that silently never runs.
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

#include <gradaccum/detail/trainer/hooks.inl>
#undef GRADACCUM_HOOK

namespace hooks {

template <class P>
inline constexpr bool any_in =
#define GRADACCUM_HOOK(name, signature, form) name::in<P> ||
#include <gradaccum/detail/trainer/hooks.inl>
#undef GRADACCUM_HOOK
    false;

}  // namespace hooks

/// A class that takes part in training by members with the names of hooks: any of them, in any order.
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
/// | hook | when, and what it may do |
/// |---|---|
/// | `attach(TrainerBase&)` | once, when the trainer is built; with `auto&` it sees the types, too |
/// | `on_epoch_begin(epoch)`, `on_epoch_end(epoch)` | around an epoch of `fit` |
/// | `fit_scope()` | gives a guard that is held while `fit` runs |
/// | `forward_scope()` | gives a guard that is held while the objective runs, in training and evaluation |
/// | `before_backward(Loss&)` | may change the seed of backward, never the loss |
/// | `ready()` | may this micro-batch fill the window? All are asked, before its backward; it closes if all agree |
/// | `after_backward(Gradients&)` | sees the sums so far, of the window that is still open |
/// | `before_close()` | the window is about to close: its gradients are all there, and its activations gone. With |
/// | | `OptimizerInBackward` this and the next come before the backward that fills it |
/// | `scale_gradients(Factor&)` | deferred factors, write-only: no order of policies matters |
/// | `before_step(Gradients&)` | reads the true gradients by `norm()`, reads or changes them by `values()` |
/// | `after_window(const Step&)` | the window is over: stepped or skipped |
/// | `after_step(const Step&)` | the parameters have moved |
/// | `before_boundary()` | in `fit`, after all of the above: between two micro-batches, and at the end of an epoch. |
/// | | The moment to evaluate, and to tell it by `TrainerBase::validated` |
/// | `on_validation(const Validation&)` | hears what was found |
/// | `at_boundary()` | in `fit`, after that. The moment to save everything |
/// | `others_continue()` | in `fit`, when an epoch has no more batches: is the next window to be closed as it is, |
/// | | for other processes that have some? Asked again after each |
/// | `state(Archive&)` | saves and loads what it would miss; needs a member `std::string_view name`, static or not |
///
/// It must not be final. A member of such a name with another signature does not compile, with a sentence; a name that
/// is misspelt cannot be noticed: `static_assert(ga::hook::before_step<GradientNoise>)`.
template <class P>
concept policy = std::is_class_v<P> && !std::is_final_v<P> && hooks::any_in<P>;

}  // namespace gradaccum
