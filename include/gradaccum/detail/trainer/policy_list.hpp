// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/progress.hpp>
#include <gradaccum/policy.hpp>

#include <concepts>
#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

/// The policies as given; and where none of them is a `Progress`, before them one that shows itself on terminals only:
/// its line is wiped before others print.
template <class... Policies>
auto with_progress(Policies... policies) {
  std::tuple<policy_t<Policies>...> given(as_policy(std::move(policies))...);
  if constexpr ((std::derived_from<Policies, Progress> || ...))
    return given;
  else
    return std::tuple_cat(std::tuple<Progress>(Progress{.line = {.only_on_terminal = true}}), std::move(given));
}

/// The policies of a Trainer, whose hooks are called in their order.
template <class... Policies>
class PolicyList {
 public:
  explicit PolicyList(Policies... policies) : policies_(with_progress(std::move(policies)...)) {}

  /// One of them has this hook.
  template <class Hook>
  static constexpr bool has = []<class... All>(std::type_identity<std::tuple<All...>>) {
    return (Hook::template in<All> || ...);
  }(std::type_identity<decltype(with_progress(std::declval<Policies>()...))>());

  template <class Hook, class... Arguments>
  void all(Arguments&... arguments) {
    std::apply([&](auto&... policy) { (call<Hook>(policy, arguments...), ...); }, policies_);
  }

  /// That of several processes comes first: others ask which of them this is, or evaluate what is the same on all.
  template <class Hook, class... Arguments>
  void processes_first(Arguments&... arguments) {
    for (const bool of_processes : {true, false}) {
      const auto each = [&]<class P>(P& policy) {
        if (hook::others_continue<P> == of_processes) call<Hook>(policy, arguments...);
      };
      std::apply([&](auto&... policy) { (each(policy), ...); }, policies_);
    }
  }

  /// None that has a say is against it. All are asked, whatever the others say.
  bool ready() {
    bool all = true;
    std::apply([&](auto&... policy) { ((all = says<hooks::ready>(policy, true) && all), ...); }, policies_);
    return all;
  }
  bool others_continue() {
    bool any = false;
    std::apply([&](auto&... policy) { ((any = says<hooks::others_continue>(policy, false) || any), ...); }, policies_);
    return any;
  }

  /// Runs `work` inside the scopes that this hook of all gives.
  template <class Hook, std::size_t next = 0, class Work>
  decltype(auto) in_scopes(const Work& work) {
    if constexpr (next == std::tuple_size_v<Tuple>) {
      return work();
    } else if constexpr (Hook::template in<std::tuple_element_t<next, Tuple>>) {
      using Scope = decltype(Hook::call(std::get<next>(policies_)));
      static_assert(!std::is_void_v<Scope>,
                    "policy: forward_scope must give back the guard that is held, and fit_scope as well");
      [[maybe_unused]] auto scope = Hook::call(std::get<next>(policies_));
      return in_scopes<Hook, next + 1>(work);
    } else {
      return in_scopes<Hook, next + 1>(work);
    }
  }

  template <class Policy>
  Policy& get() {
    static_assert(count<Policy> == 1, "Trainer: policy<P>() needs P to be one of its policies, and the only one");
    return std::get<Policy>(policies_);
  }

  /// Each under its name. If one cannot load, all are as before.
  void state(Archive& archive) {
    if (archive.loading()) {
      auto before = Archive::of_references();
      state_of_each(before);
      archive.if_not_all_fit([this, before] { go_back(before); });
    }
    state_of_each(archive);
  }

 private:
  using Tuple = decltype(with_progress(std::declval<Policies>()...));

  template <class Policy>
  static constexpr auto count = []<class... All>(std::type_identity<std::tuple<All...>>) {
    return (std::same_as<Policy, All> + ... + 0);
  }(std::type_identity<Tuple>());

  template <class Hook, class Policy, class... Arguments>
  static void call(Policy& policy, Arguments&... arguments) {
    if constexpr (Hook::template in<Policy>) Hook::call(policy, arguments...);
  }
  template <class Hook, class Policy>
  static bool says(Policy& policy, bool otherwise) {
    if constexpr (Hook::template in<Policy>) {
      constexpr bool tells = std::convertible_to<decltype(Hook::call(policy)), bool>;
      static_assert(tells, "policy: ready must be callable as bool ready(), others_continue as bool others_continue()");
      if constexpr (tells) return Hook::call(policy);
    }
    return otherwise;
  }
  void go_back(const Archive& before) {
    auto archive = Archive::to_go_back(before);
    try {
      state_of_each(archive);
    } catch (...) {  // one that never loads: those before it are back, those after it have not changed
    }
  }
  void state_of_each(Archive& archive) {
    std::apply([&](auto&... policy) { (state_of(policy, archive), ...); }, policies_);
  }
  template <class Policy>
  static void state_of(Policy& policy, Archive& archive) {
    if constexpr (hook::state<Policy>) {
      constexpr bool has_name = requires { std::string_view(policy.name); };
      static_assert(has_name, "policy: with state(ga::Archive&) goes a member std::string_view name, static or not");
      if constexpr (has_name) archive(policy.name, policy);
    }
  }

  Tuple policies_;
};

}  // namespace gradaccum::detail
