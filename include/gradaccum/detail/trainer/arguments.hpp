// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/policy.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

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

/// The optimizer that was given, or that is behind the pointer that was given.
template <class O>
using optimizer_t = std::remove_cvref_t<decltype(pointee_of(std::declval<std::remove_reference_t<O>&>()))>;

/// Returns the optimizer, checked for errors that its type does not show.
template <class O>
auto& checked_optimizer(O& given) {
  if constexpr (!is_optimizer<std::remove_cvref_t<O>> && requires { given == nullptr; })
    TORCH_CHECK(!(given == nullptr), "Trainer: the pointer to the optimizer must not be null; was it moved from?");
  auto& optimizer = pointee_of(given);
  if constexpr (std::derived_from<std::remove_cvref_t<decltype(optimizer)>, torch::optim::Optimizer>)
    check_can_be_wrapped(optimizer, "Trainer",
                         "ga::Accumulate{.steps = n} says how many micro-batches an update takes");
  return optimizer;
}

/// Refuses types that a Trainer cannot be made of.
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
      "Trainer: takes over a pointer to an optimizer, but nothing else that holds one");
  if constexpr (!is_optimizer<Pointer> && std::constructible_from<Pointer, O>)
    return std::make_shared<Pointer>(std::forward<O>(given));
  return nullptr;
}

/// The learning rate of the first group; NaN where the optimizer does not tell.
template <class O>
double learning_rate_of(O& optimizer) try {
  if constexpr (requires { optimizer.param_groups().front().options().get_lr(); })
    if (!optimizer.param_groups().empty()) return optimizer.param_groups().front().options().get_lr();
  return std::numeric_limits<double>::quiet_NaN();
} catch (const c10::Error&) {  // LibTorch's base class throws for options of the user's own
  return std::numeric_limits<double>::quiet_NaN();
}

/// The `name` that all policies of a kind share, of which a Trainer has one at most; empty if the policy has none.
template <class P>
constexpr std::string_view name_of_kind() {
  if constexpr (requires { std::bool_constant<(std::string_view(P::name), true)>(); })
    return P::name;
  else
    return {};
}

template <class... P>
constexpr bool are_of_different_kinds() {
  const std::array<std::string_view, sizeof...(P)> names{name_of_kind<P>()...};
  for (std::size_t i = 0; i < names.size(); ++i)
    if (!names[i].empty() && std::find(names.begin(), names.begin() + i, names[i]) != names.begin() + i) return false;
  return true;
}

/// A policy of any class, as a table of its hooks, so that all that a Trainer does is compiled once. A hook that the
/// policy does not have is null.
class AnyPolicy {
 public:
  template <class Result, class... Arguments>
  using Hook = Result (*)(AnyPolicy&, Arguments...);
  using ScopeHook =
      Hook<std::shared_ptr<void>, std::shared_ptr<void>>;  ///< a guard that also holds the one it is given

  virtual ~AnyPolicy() = default;

  Hook<void, TrainerBase&> attach = nullptr;
  ScopeHook fit_scope = nullptr, forward_scope = nullptr;
  Hook<void, Loss&> before_backward = nullptr;
  Hook<bool> ready = nullptr, others_continue = nullptr;
  Hook<void, Gradients&> after_backward = nullptr, reduce_gradients = nullptr, before_step = nullptr;
  Hook<void, Factor&> scale_gradients = nullptr;
  Hook<void, const Step&> after_window = nullptr, after_step = nullptr;
  Hook<void> before_close = nullptr, before_boundary = nullptr, at_boundary = nullptr;
  Hook<void, const Validation&> on_validation = nullptr;
  Hook<void, std::int64_t> on_epoch_begin = nullptr, on_epoch_end = nullptr;
  Hook<void, Archive&> state = nullptr;
};

template <class P>
class PolicyOf final : public AnyPolicy {
 public:
  explicit PolicyOf(P given);

  P policy;

 private:
  static P& policy_of(AnyPolicy& any) { return static_cast<PolicyOf&>(any).policy; }

  template <class Found, class Result, class... Arguments>
  static void set(Result (*&hook)(AnyPolicy&, Arguments...)) {
    if constexpr (Found::template in<P>) {
      using Given = decltype(Found::call(std::declval<P&>(), std::declval<Arguments&>()...));
      constexpr bool says = std::is_void_v<Result> || std::convertible_to<Given, Result>;
      static_assert(says, "policy: ready must be callable as bool ready(), others_continue as bool others_continue()");
      if constexpr (says)
        hook = [](AnyPolicy& any, Arguments... arguments) {
          return static_cast<Result>(Found::call(policy_of(any), arguments...));
        };
    }
  }
  template <class Found>
  static void set_scope(ScopeHook& hook) {
    if constexpr (Found::template in<P>) {
      using Guard = std::decay_t<decltype(Found::call(std::declval<P&>()))>;
      constexpr bool gives = !std::is_void_v<Guard>;
      static_assert(gives, "policy: forward_scope must give back the guard that is held, and fit_scope as well");
      if constexpr (gives)
        hook = [](AnyPolicy& any, std::shared_ptr<void> outer) -> std::shared_ptr<void> {
          struct Scope {
            std::shared_ptr<void> outer;
            Guard guard;
          };
          return std::shared_ptr<Scope>(new Scope{std::move(outer), Found::call(policy_of(any))});
        };
    }
  }
};

/// Checks and sets a policy's hooks. If one has the wrong form, the compiler names the line that makes the Trainer.
template <class P>
PolicyOf<P>::PolicyOf(P given) : policy(std::move(given)) {
  set_scope<hooks::fit_scope>(fit_scope);
  set_scope<hooks::forward_scope>(forward_scope);
  set<hooks::before_backward>(before_backward);
  set<hooks::ready>(ready);
  set<hooks::after_backward>(after_backward);
  set<hooks::before_close>(before_close);
  set<hooks::scale_gradients>(scale_gradients);
  set<hooks::reduce_gradients>(reduce_gradients);
  set<hooks::before_step>(before_step);
  set<hooks::after_window>(after_window);
  set<hooks::after_step>(after_step);
  set<hooks::before_boundary>(before_boundary);
  set<hooks::on_validation>(on_validation);
  set<hooks::at_boundary>(at_boundary);
  set<hooks::others_continue>(others_continue);
  set<hooks::on_epoch_begin>(on_epoch_begin);
  set<hooks::on_epoch_end>(on_epoch_end);
  if constexpr (hook::state<P>) {
    constexpr bool has_name = requires { std::string_view(policy.name); };
    static_assert(has_name, "policy: with state(ga::Archive&) goes a member std::string_view name, static or not");
    static_cast<void>(&hooks::state::call<P, Archive>);
    if constexpr (has_name)
      state = [](AnyPolicy& any, Archive& archive) { archive(policy_of(any).name, policy_of(any)); };
  }
}

/// A batch of any type, as a Trainer sees it.
class AnyBatch {
 public:
  virtual ~AnyBatch() = default;
  virtual std::int64_t samples() const = 0;
  virtual std::string fingerprint() const = 0;
  virtual Loss loss() const = 0;  ///< the objective's

  /// For `FitMemory`; the others throw if it is not divisible.
  virtual bool is_divisible() const = 0;
  virtual std::int64_t rows() const = 0;
  virtual RowKind kind() const = 0;
  virtual void part(std::int64_t from, std::int64_t to, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

[[noreturn]] inline void cannot_be_divided(const std::type_info& type) {
  TORCH_CHECK(false,
              "FitMemory: a batch must be one that can be divided: a Tensor, a pair or tuple of them, one with "
              ".data and .target and nothing else, a vector of samples that are no tensors, got ",
              name_of_class(type),
              ": declare slice(batch, from, to), which gives these samples, and batch_size(batch) beside the class");
}

template <class Batch, class Model, class Objective>
class BatchOf final : public AnyBatch {
 public:
  BatchOf(Batch& batch, Model& model, Objective& objective) : batch_(batch), model_(model), objective_(objective) {}
  std::int64_t samples() const override { return samples_of(batch_); }
  std::string fingerprint() const override { return fingerprint_of(batch_); }
  Loss loss() const override {
    constexpr bool is_objective = std::is_invocable_r_v<Loss, Objective&, Model&, Batch&>;
    static_assert(is_objective,
                  "Trainer: the objective must be callable as objective(model, batch), with both as they were given, "
                  "and return a Tensor or a ga::Loss");
    if constexpr (is_objective) {
      using Result = std::remove_cvref_t<std::invoke_result_t<Objective&, Model&, Batch&>>;
      if constexpr (std::derived_from<Result, at::Tensor>) {  // a mean over the batch's samples
        const std::int64_t number = samples();                // before the objective can move the batch's tensors away
        if constexpr (std::is_member_pointer_v<Objective>)
          return Loss(std::invoke(objective_, model_, batch_), number);
        else
          return Loss(objective_(model_, batch_), number);
      } else if constexpr (std::is_member_pointer_v<Objective>) {
        return std::invoke(objective_, model_, batch_);
      } else {
        return objective_(model_, batch_);
      }
    }
  }

  bool is_divisible() const override { return divisible; }
  std::int64_t rows() const override {
    if constexpr (divisible)
      return rows_of<Own>(batch_);
    else
      cannot_be_divided(typeid(Batch));
  }
  RowKind kind() const override {
    if constexpr (divisible)
      return kind_of_rows<Own>(batch_);
    else
      cannot_be_divided(typeid(Batch));
  }
  void part(std::int64_t from, std::int64_t to, c10::function_ref<void(const AnyBatch&)> use) const override {
    if constexpr (divisible) {
      Batch rows = narrowed<Own>(batch_, from, to - from);
      use(BatchOf(rows, model_, objective_));
    } else {
      cannot_be_divided(typeid(Batch));
    }
  }

 private:
  using Own = std::remove_const_t<Batch>;
  /// Excludes a vector of tensors, which may be samples, or inputs and targets.
  static constexpr bool divisible = has_rows<Own> && !std::same_as<Own, std::vector<at::Tensor>>;

  Batch& batch_;
  Model& model_;
  Objective& objective_;
};

/// Called with each batch of a pass.
class BatchVisitor {
 public:
  /// Returns false to end the pass.
  virtual bool visit(const AnyBatch& batch) = 0;

 protected:
  ~BatchVisitor() = default;
};

/// A range of batches, of any type, which is gone through once an epoch.
class AnyBatches {
 public:
  virtual ~AnyBatches() = default;
  virtual std::optional<std::int64_t> number() const = 0;  ///< if the range tells
  virtual const void* address() const = 0;                 ///< of the user's range
  virtual bool has_state() const = 0;
  virtual void state(Archive& archive) = 0;
  /// Returns true if there are no more batches, false if the visitor has ended the pass.
  virtual bool for_each(BatchVisitor& visitor) = 0;
};

template <class Batches, class Model, class Objective>
class BatchesOf final : public AnyBatches {
 public:
  BatchesOf(Batches& batches, Model& model, Objective& objective)
      : batches_(batches), model_(model), objective_(objective) {}
  std::optional<std::int64_t> number() const override { return batches_of(batches_); }
  const void* address() const override { return std::addressof(batches_); }
  bool has_state() const override { return saves_itself; }
  void state(Archive& archive) override {
    if constexpr (saves_itself) archive("batches", batches_);
  }
  bool for_each(BatchVisitor& visitor) override {
    for (auto&& batch : batches_)
      if (!visitor.visit(BatchOf(batch, model_, objective_))) return false;
    return true;
  }

 private:
  static constexpr bool saves_itself = requires(Batches & batches, Archive& archive) { batches.state(archive); };

  Batches& batches_;
  Model& model_;
  Objective& objective_;
};

/// Divides a Trainer's batches into parts.
class BatchDivider {
 public:
  virtual ~BatchDivider() = default;
  /// Returns the row before which the window that is open at row `from` ends.
  virtual std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const = 0;
  /// Trains with these rows, which are of one window.
  virtual void run(const AnyBatch& batch, std::int64_t from, std::int64_t to) = 0;
  /// For evaluation.
  virtual void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

}  // namespace gradaccum::detail
