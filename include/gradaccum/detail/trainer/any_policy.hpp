// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>

#include <algorithm>
#include <array>
#include <cstddef>

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
  constexpr bool callable = std::invocable<P&, const Step&>;
  if constexpr (gradaccum::policy<P>) {
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
class AnyPolicy {
 public:
  template <class Result, class... Arguments>
  using Hook = Result (*)(AnyPolicy&, Arguments...);
  using ScopeHook = Hook<std::shared_ptr<void>, std::shared_ptr<void>>;  ///< returns a guard that holds the given one

  virtual ~AnyPolicy() = default;

#define GRADACCUM_HOOK(name, signature, form) HookOf<signature>::type name = nullptr;
#include <gradaccum/detail/trainer/hooks.inl>
#undef GRADACCUM_HOOK
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
    if constexpr (Found::template in<P>) {
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
PolicyOf<P>::PolicyOf(P given) : policy(std::move(given)) {
#define GRADACCUM_HOOK(name, signature, form) set<hooks::name>(this->name);
#include <gradaccum/detail/trainer/hooks.inl>
#undef GRADACCUM_HOOK
}

/// The policies of a Trainer, whose hooks are called in their order.
struct PolicyList {
  std::vector<std::unique_ptr<AnyPolicy>> list;

  template <class... Parameters, class... Arguments>
  void all(AnyPolicy::Hook<void, Parameters...> AnyPolicy::*hook, Arguments&&... arguments) {
    for (auto& policy : list)
      if (const auto call = policy.get()->*hook) call(*policy, arguments...);
  }
  /// Calls policies of several ranks first, so that the others see buffers that are equal on all ranks.
  void on_epoch_end(std::int64_t epoch) {
    for (const bool of_processes : {true, false})
      for (auto& policy : list)
        if (policy->on_epoch_end && (policy->others_continue != nullptr) == of_processes)
          policy->on_epoch_end(*policy, epoch);
  }

  /// Returns true if no policy returns false.
  bool ready() { return !any_says(false, &AnyPolicy::ready); }
  /// Informs all ranks that this one has no more batches, and of requests such as to stop. Returns true if another rank
  /// has batches, so that this one joins its next window.
  bool others_continue() { return any_says(true, &AnyPolicy::others_continue); }
  /// Calls the hook of all policies, and returns true if one returned `answer`.
  bool any_says(bool answer, AnyPolicy::Hook<bool> AnyPolicy::*hook) {
    bool any = false;
    for (auto& policy : list)
      if (const auto ask = policy.get()->*hook) any = ask(*policy) == answer || any;
    return any;
  }

  /// Returns the guards of all policies, which are released together, the last one first.
  std::shared_ptr<void> scopes(AnyPolicy::ScopeHook AnyPolicy::*hook) {
    std::shared_ptr<void> scopes;
    for (auto& policy : list)
      if (const auto enter = policy.get()->*hook) scopes = enter(*policy, std::move(scopes));
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
    for (auto& policy : list) {
      const bool sees = policy->before_backward || policy->after_backward || policy->forward_scope || policy->ready;
      if (sees && policy->state) policy->state(*policy, archive);
    }
  }
};

}  // namespace gradaccum::detail
