// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/detail/training/any_batch.hpp>
#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/detail/window/optimizer_facade.hpp>
#include <gradaccum/policies.hpp>
#include <gradaccum/trainer_base.hpp>
#include <gradaccum/training_state.hpp>

namespace gradaccum::detail {

/// The type as which a Trainer holds a model: a plain module by reference, a `ModuleHolder` or a pointer by value.
template <class M>
using kept_model_t = std::conditional_t<plain_module<M>, M, std::remove_cvref_t<M>>;

template <class O>
concept is_optimizer = std::derived_from<O, torch::optim::Optimizer> || optimizer<O>;

template <class O>
auto& pointee_of(O& given) {
  if constexpr (is_optimizer<std::remove_cvref_t<O>>)
    return given;
  else
    return *given;
}

/// The type of the optimizer that was passed, itself or by a pointer.
template <class O>
using optimizer_t = std::remove_cvref_t<decltype(pointee_of(std::declval<std::remove_reference_t<O>&>()))>;

/// Returns the optimizer, checked for errors that its type does not show.
template <class O>
auto& checked_optimizer(O& given) {
  if constexpr (!is_optimizer<std::remove_cvref_t<O>> && requires { given == nullptr; })
    TORCH_CHECK(!(given == nullptr), "Trainer: the optimizer pointer must not be null; was it moved from?");
  auto& optimizer = pointee_of(given);
  if constexpr (std::derived_from<std::remove_cvref_t<decltype(optimizer)>, torch::optim::Optimizer>)
    check_can_be_wrapped(optimizer, "Trainer",
                         "ga::Accumulate{.steps = n} says how many micro-batches an update takes");
  return optimizer;
}

/// Fails to compile for types that a Trainer cannot hold.
template <class Model, class Optimizer>
constexpr bool are_trainer_arguments() {
  static_assert(model<Model>, "Trainer: a model is a torch::nn::Module, a ModuleHolder, or a pointer to one");
  static_assert(!plain_module<Model> || std::is_lvalue_reference_v<Model>,
                "Trainer: holds a plain module by reference; give it a name first, or use a ModuleHolder");
  static_assert(!std::is_const_v<std::remove_reference_t<Model>>, "Trainer: a module that is const cannot be trained");
  static_assert(!accumulating<Optimizer>, "Trainer: give it the optimizer itself, and ga::Accumulate{.steps = N}");
  static_assert(!std::derived_from<Optimizer, torch::optim::LBFGS>,
                "Trainer: LBFGS calls its closure several times a step, so it has no micro-batches; use SGD, Adam, "
                "AdamW, RMSprop, Adagrad or one of your own");
  return true;
}

/// Keeps an owning pointer alive, if it was moved here or can be shared.
template <class O>
std::shared_ptr<void> kept_owner(O&& given) {
  using Pointer = std::remove_cvref_t<O>;
  static_assert(std::is_lvalue_reference_v<O> || !is_optimizer<Pointer>,
                "Trainer: holds the optimizer by reference; give it a name first, or a pointer to it");
  static_assert(
      std::is_lvalue_reference_v<O> || is_optimizer<Pointer> || requires { given == nullptr; },
      "Trainer: pass the optimizer or a pointer to it, not another class that holds one");
  if constexpr (!is_optimizer<Pointer> && std::constructible_from<Pointer, O>)
    return std::make_shared<Pointer>(std::forward<O>(given));
  return nullptr;
}

}  // namespace gradaccum::detail

namespace gradaccum {

/// A training loop over a model, an optimizer, an objective, and policies that each add one feature.
///
///     auto objective = [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     };
///     ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 8}, ga::ClipNorm{.max = 1.0},
///                         [](const ga::Step& step) { if (step.update % 100 == 0) std::cout << step.loss << '\n'; });
///     std::cout << trainer.fit(batches, {.epochs = 3});
///
/// Model. A ModuleHolder, a pointer to a module, or a plain module, which is held by reference. The objective receives
/// it as it was passed. The optimizer may be any but LBFGS, passed by reference or by pointer.
///
/// Objective. Returns a Tensor with one element, the mean over the batch's samples; or `ga::Loss{mean, items}` for a
/// mean over other items. Metrics need `ga::Loss{mean, items}.with(output, target)`. Batches may be of any type, in any
/// range.
///
/// Policies. A policy has some of the hooks of policy.hpp, or is a callable that takes `const ga::Step&` and is called
/// after each update; or it is a `std::optional` of one. The order of policies matters only within a hook.
///
/// Exceptions. An exception from any call discards the window and restores the module's mode. All objects remain
/// usable.
///
/// @note Synchronizes once per window to check losses and gradients (see `OnNan`), and as its policies do.
template <class Model, class Optimizer, class Objective, class... Policies>
class Trainer : public TrainerBase {
  static_assert(detail::are_trainer_arguments<Model, Optimizer>());
  static_assert(
      detail::are_of_different_kinds<detail::policy_t<Policies>...>(),
      "Trainer: two policies are of one kind, by the same static member name: two Accumulate, say, or a Schedule "
      "and a ReduceLROnPlateau, which both set learning rates; pass one of them");

 public:
  template <class GivenModel, class GivenOptimizer>
  Trainer(GivenModel&& model, GivenOptimizer&& optimizer, Objective objective, Policies... policies)
      : TrainerBase(std::make_unique<detail::OptimizerOf<Optimizer>>(detail::checked_optimizer(optimizer))),
        model_(std::forward<GivenModel>(model)),
        optimizer_(detail::pointee_of(optimizer)),
        optimizer_owner_(detail::kept_owner(std::forward<GivenOptimizer>(optimizer))),
        objective_(std::move(objective)) {
    if constexpr (std::same_as<Optimizer, optim::MultiOptimizer>) optimizer_.check(module());
    try {
      if constexpr (!shows_progress) add_policy(Progress{.line = {.only_on_terminal = true}});
      (add_policy(std::move(policies)), ...);
      built();
    } catch (...) {
      end();
      throw;
    }
  }

  ~Trainer() override { end(); }

  /// Trains for the given number of epochs or updates. Epochs continue the count of the last `fit`. Puts the model in
  /// training mode unless it is already, so that submodules in evaluation mode can stay in it.
  FitReport fit(auto&& batches, const FitOptions& options = {}) {
    detail::BatchesOf any(batches, model_, objective_);
    return fit_with(any, options);
  }

  /// Returns the mean loss and other metrics over the batches, in evaluation mode and without gradients.
  template <class... Metrics>
  Evaluation evaluate(auto&& batches, Metrics... metrics) {
    detail::BatchesOf any(batches, model_, objective_);
    return evaluate_with(any, detail::Evaluator(std::move(metrics)...));
  }

  /// Like `evaluate`, for several ranks: each passes its share of the batches, and all get the result over every share.
  /// Metrics need `reduce`, as `Accuracy` has.
  template <class... Metrics>
  Evaluation evaluate_on_all(auto&& batches, Metrics... metrics) {
    detail::BatchesOf any(batches, model_, objective_);
    return evaluate_with(any, detail::Evaluator(std::move(metrics)...), /*on_all=*/true);
  }

  /// Like `evaluate_on_all`, for a policy inside `fit`. A signal ends both at the next batch; it then returns nullopt.
  template <class... Metrics>
  std::optional<Evaluation> validate(auto&& batches, Metrics... metrics) {
    detail::BatchesOf any(batches, model_, objective_);
    return validate_with(any, detail::Evaluator(std::move(metrics)...));
  }

  /// Trains on one micro-batch. Returns true if it closed the window and updated the parameters.
  bool step(auto&& batch) { return step_with(detail::BatchOf(batch, model_, objective_)); }

  Model& model() { return model_; }
  torch::nn::Module& module() override { return detail::module_of(model_); }
  Optimizer& optimizer() { return optimizer_; }
  void check_optimizer_state() override { OptimizerState(optimizer_, module()).check(); }
  template <class Hook>
  static constexpr bool has =  ///< true if a policy itself has the hook, not only what its `start` returns
      (Hook::template in<detail::policy_t<Policies>> || ...);
  /// Returns the policy of this type; for policies with results, such as `Report`, their `Running`.
  template <class Policy>
  auto& policy() {
    static_assert(count_of<Policy> == 1, "Trainer: policy<P>() needs P to be one of its policies, and the only one");
    auto* const policy = find_policy<Policy>();
    TORCH_CHECK(policy, "Trainer: policy<", detail::name_of_class(typeid(Policy)),
                ">() must be present, but its std::optional was empty");
    return *policy;
  }
  /// Returns the policy of this type, or nullptr if there is none.
  template <class Policy>
  auto* find_policy() {
    using Held = detail::policy_t<Policy>;
    detail::PolicyOf<Held>* found = nullptr;
    if constexpr (count_of<Policy> == 1)
      found = static_cast<detail::PolicyOf<Held>*>(TrainerBase::find_policy(typeid(detail::PolicyOf<Held>)));
    return found ? &found->policy : nullptr;
  }

 private:
  template <class Policy>
  static constexpr auto count_of = (std::same_as<detail::policy_t<Policy>, detail::policy_t<Policies>> + ... + 0);
  static constexpr bool shows_progress = (std::derived_from<detail::policy_t<Policies>, Progress> || ...);

  void archive_optimizer(Archive& archive) override {
    archive("optimizer", OptimizerState(optimizer_, module(), shards()));
  }

  template <class Given>
  void add_policy(Given given) {
    using Policy = detail::policy_t<Given>;
    auto any = std::make_unique<detail::PolicyOf<Policy>>(detail::as_policy(std::move(given)));
    if constexpr (hook::attach<Policy>)
      any->attach = [](detail::AnyPolicy& one, TrainerBase& trainer) {
        hooks::attach::call(static_cast<detail::PolicyOf<Policy>&>(one).policy, static_cast<Trainer&>(trainer));
      };
    add(std::move(any));
  }
  template <class Policy>
  void add_policy(std::optional<Policy> policy) {
    if (policy) add_policy(std::move(*policy));
  }

  Model model_;
  Optimizer& optimizer_;
  std::shared_ptr<void> optimizer_owner_;
  Objective objective_;
};

template <class Model, class Optimizer, class Objective, class... Policies>
Trainer(Model&&, Optimizer&&, Objective, Policies...)
    -> Trainer<detail::kept_model_t<Model>, detail::optimizer_t<Optimizer>, Objective, Policies...>;

}  // namespace gradaccum
