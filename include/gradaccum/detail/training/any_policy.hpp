// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Wraps a callable as a policy.
template <class F>
struct Callback {
  F call;
  void after_step(const Step& step) { call(step); }
};

template <class P>
auto as_policy(P policy) {
  static_assert(!std::is_final_v<P>, "Trainer: a policy must not be final: its hooks are found by deriving from it");
  static_assert(
      !derives_from_running<P>,
      "Trainer: a class that is derived from a policy of the library with a Running, such as DataParallel, is "
      "no policy; pass the options themselves, and a policy of your own beside them");
  constexpr bool callable = std::invocable<P&, const Step&>;
  if constexpr (has_running<P>) {
    return typename P::Running(std::move(policy));
  } else if constexpr (gradaccum::policy<P>) {
    static_assert(!callable || hook::after_step<P>,
                  "Trainer: a policy with hooks is not called as a callable, too; name its call operator after_step");
    return policy;
  } else {
    static_assert(callable || std::is_final_v<P>,
                  "Trainer: expected a policy, which has one of the hooks of policy.hpp, or a callable that takes "
                  "const ga::Step&");
    return Callback<P>{std::move(policy)};
  }
}

template <class P>
struct PolicyType : std::type_identity<decltype(as_policy(std::declval<P>()))> {};
template <class P>
struct PolicyType<std::optional<P>> : PolicyType<P> {};
template <class P>
using policy_t = typename PolicyType<P>::type;

/// Returns the `name` of the policy's kind, of which a Trainer has at most one policy; empty if it has none.
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

class AnyPolicy;

template <class Type>
struct HookOf;
template <class Result, class... Arguments>
struct HookOf<Result(Arguments...)> : std::type_identity<Result (*)(AnyPolicy&, Arguments...)> {};

/// A policy of any class as a table of its hooks, so that the Trainer's loop is compiled once. Hooks that the policy
/// does not have are null.
class AnyPolicy : public PolicyRun {
 public:
  template <class Result, class... Arguments>
  using Hook = Result (*)(AnyPolicy&, Arguments...);
  using ScopeHook = Hook<std::shared_ptr<void>, std::shared_ptr<void>>;  ///< returns a guard that holds the given one

  std::shared_ptr<PolicyRun> (*start)(AnyPolicy&, TrainerBase&) = nullptr;  ///< null if the policy has no run
  std::shared_ptr<AnyPolicy> run = nullptr;

#define GRADACCUM_HOOK(name, signature, form) HookOf<signature>::type name = nullptr;
#include <gradaccum/detail/training/hooks.inl>
#undef GRADACCUM_HOOK
};

template <class P>
class PolicyOf final : public AnyPolicy {
 public:
  explicit PolicyOf(P given) : policy(std::move(given)) { set_hooks(); }
  /// Constructs the policy in place.
  template <class... Given>
  explicit PolicyOf(std::in_place_t, Given&&... given) : policy{std::forward<Given>(given)...} {
    set_hooks();
  }

  ~PolicyOf() override { this->run.reset(); }  // it may refer to the policy

  P policy;

 private:
  void set_hooks();
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
  static void set(ScopeHook& hook) {
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
  template <class Found>
  static void set(Hook<void, Archive&>& hook) {
    if constexpr (Found::template in<P> && !has_run<P>) {  // else the run saves the policy
      constexpr bool has_name = requires(P & one) { std::string_view(one.name); };
      static_assert(has_name, "policy: with state(ga::Archive&) goes a member std::string_view name, static or not");
      static_cast<void>(&Found::template call<P, Archive>);
      if constexpr (has_name)
        hook = [](AnyPolicy& any, Archive& archive) { archive(policy_of(any).name, policy_of(any)); };
    }
  }
  template <class Found>
  static void set(Hook<void, TrainerBase&>&) {}  // the Trainer sets attach, which may take its type
};

/// Checks and sets a policy's hooks. If one is wrong, the compiler's message includes the line that constructs the
/// Trainer.
template <class P>
void PolicyOf<P>::set_hooks() {
#define GRADACCUM_HOOK(name, signature, form) set<hooks::name>(this->name);
#include <gradaccum/detail/training/hooks.inl>
#undef GRADACCUM_HOOK
  if constexpr (has_run<P>) start = [](AnyPolicy& any, TrainerBase& trainer) { return policy_of(any).start(trainer); };
}

/// Constructs the run of a policy, a class with hooks, from these arguments.
template <class Run, class... Given>
std::shared_ptr<PolicyOf<Run>> started(Given&&... given) {
  return std::make_shared<PolicyOf<Run>>(std::in_place, std::forward<Given>(given)...);
}

/// Like `started`, and lets `kept` share the run.
template <class Run, class... Given>
std::shared_ptr<PolicyRun> started_and_kept(std::shared_ptr<Run>& kept, Given&&... given) {
  const auto run = started<Run>(std::forward<Given>(given)...);
  kept = {run, &run->policy};
  return run;
}

/// The policies of a Trainer, whose hooks are called in their order. Policies of several ranks come first: their work
/// on all ranks precedes that of others on one, and at an epoch's end all see equal buffers.
class PolicyList {
 public:
  void add(std::unique_ptr<AnyPolicy> policy) {
    const auto of_ranks = [](auto& one) { return one->others_continue != nullptr; };
    const auto position = of_ranks(policy) ? std::find_if_not(list_.begin(), list_.end(), of_ranks) : list_.end();
    list_.insert(position, std::move(policy));
  }
  AnyPolicy* find(const std::type_info& type) const {
    for (auto& policy : list_)
      if (const auto& one = *policy; typeid(one) == type) return policy.get();
    return nullptr;
  }

  /// Attaches all policies, starts their runs, and then calls the functions of when_started().
  void start(TrainerBase& trainer) {
    for (auto& policy : list_)
      if (policy->attach) policy->attach(*policy, trainer);
    for (auto& policy : list_)
      if (policy->start) policy->run = std::static_pointer_cast<AnyPolicy>(policy->start(*policy, trainer));
    is_started_ = true;
    for (auto& run : std::exchange(when_started_, {})) run();
  }
  void when_started(std::function<void()> run) {
    if (is_started_) return run();
    when_started_.push_back(std::move(run));
  }

  template <class... Parameters, class... Arguments>
  void all(AnyPolicy::Hook<void, Parameters...> AnyPolicy::*hook, Arguments&&... arguments) {
    for_each_with(hook, [&](auto call, AnyPolicy& policy) { call(policy, arguments...); });
  }
  std::int64_t count_with(AnyPolicy::Hook<bool> AnyPolicy::*hook) const {
    std::int64_t count = 0;
    for_each_with(hook, [&](auto, AnyPolicy&) { ++count; });
    return count;
  }

  /// Returns true if no policy returns false.
  bool ready() { return !any_says(false, &AnyPolicy::ready); }
  /// Informs all ranks that this one has no more batches, and of requests such as to stop. Returns true if another rank
  /// has batches, so that this one joins its next window.
  bool others_continue() { return any_says(true, &AnyPolicy::others_continue); }

  /// Returns the guards of all policies, which are released together, the last one first.
  std::shared_ptr<void> scopes(AnyPolicy::ScopeHook AnyPolicy::*hook) {
    std::shared_ptr<void> scopes;
    for_each_with(hook, [&](auto enter, AnyPolicy& policy) { scopes = enter(policy, std::move(scopes)); });
    return scopes;
  }

  /// Saves or loads each policy under its name. If one cannot load, all are restored.
  void state(Archive& archive) {
    if (archive.loading()) {
      auto before = Archive::of_references();
      all(&AnyPolicy::state, before);
      archive.if_not_all_fit([this, before] {
        auto back = Archive::to_go_back(before);
        try {
          all(&AnyPolicy::state, back);
        } catch (...) {  // from a policy that never loads: earlier ones are restored, later ones have not changed
        }
      });
    }
    all(&AnyPolicy::state, archive);
  }
  /// Saves or loads only policies with hooks inside a window, which may have changed their state there.
  void state_in_window(Archive& archive) {
    for_each_with(&AnyPolicy::state, [&](auto save, AnyPolicy& policy) {
      if (policy.before_backward || policy.after_backward || policy.forward_scope || policy.ready)
        save(policy, archive);
    });
  }

 private:
  /// Calls `use` with the hook of each policy and each run that has it.
  template <class Hook>
  void for_each_with(Hook AnyPolicy::*hook, auto use) const {
    for (auto& policy : list_)
      for (auto* const one : {policy.get(), policy->run.get()})
        if (one && one->*hook) use(one->*hook, *one);
  }
  /// Calls the hook of all policies, and returns true if one returned `answer`.
  bool any_says(bool answer, AnyPolicy::Hook<bool> AnyPolicy::*hook) {
    bool any = false;
    for_each_with(hook, [&](auto ask, AnyPolicy& policy) { any = ask(policy) == answer || any; });
    return any;
  }

  std::vector<std::unique_ptr<AnyPolicy>> list_;
  std::vector<std::function<void()>> when_started_;
  bool is_started_ = false;
};

}  // namespace gradaccum::detail
