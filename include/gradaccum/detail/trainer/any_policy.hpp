// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/policy.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// The name that all policies of a kind have: there is one of them, then.
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

/// A policy of whatever class, as a Trainer calls it: so all that a Trainer does is compiled once. A hook that the
/// policy does not have does nothing; this class itself is one that is absent, and has none.
class AnyPolicy {
 public:
  virtual ~AnyPolicy() = default;
  virtual bool of_processes() const { return false; }        ///< has others_continue
  virtual bool sees_micro_batches() const { return false; }  ///< and may have changed in the middle of a window
  /// Both hold on to `outer` until their own guard is gone.
  virtual std::shared_ptr<void> in_fit_scope(std::shared_ptr<void> outer) { return outer; }
  virtual std::shared_ptr<void> in_forward_scope(std::shared_ptr<void> outer) { return outer; }
  virtual void before_backward(Loss&) {}
  virtual bool ready() { return true; }
  virtual void after_backward(Gradients&) {}
  virtual void before_close() {}
  virtual void scale_gradients(Factor&) {}
  virtual void reduce_gradients(Gradients&) {}
  virtual void before_step(Gradients&) {}
  virtual void after_window(const Step&) {}
  virtual void after_step(const Step&) {}
  virtual void before_boundary() {}
  virtual void on_validation(const Validation&) {}
  virtual void at_boundary() {}
  virtual bool others_continue() { return false; }
  virtual void on_epoch_begin(std::int64_t) {}
  virtual void on_epoch_end(std::int64_t) {}
  virtual void state(Archive&) {}
};

template <class P>
class PolicyOf final : public AnyPolicy {
 public:
  /// Where a hook is not as it must be, the compiler names the line that makes the Trainer, which this comes from.
  explicit PolicyOf(P given) : policy(std::move(given)) {
    check<hooks::before_backward, Loss>();
    check<hooks::after_backward, Gradients>();
    check<hooks::before_close>();
    check<hooks::scale_gradients, Factor>();
    check<hooks::reduce_gradients, Gradients>();
    check<hooks::before_step, Gradients>();
    check<hooks::after_window, const Step>();
    check<hooks::after_step, const Step>();
    check<hooks::before_boundary>();
    check<hooks::on_validation, const Validation>();
    check<hooks::at_boundary>();
    check<hooks::on_epoch_begin, std::int64_t>();
    check<hooks::on_epoch_end, std::int64_t>();
    check<hooks::state, Archive>();
    check_says<hooks::ready>();
    check_says<hooks::others_continue>();
    check_gives<hooks::fit_scope>();
    check_gives<hooks::forward_scope>();
    if constexpr (hook::state<P>) {
      constexpr bool has_name = requires { std::string_view(policy.name); };
      static_assert(has_name, "policy: with state(ga::Archive&) goes a member std::string_view name, static or not");
    }
  }

  bool of_processes() const override { return hook::others_continue<P>; }
  bool sees_micro_batches() const override {
    return hook::before_backward<P> || hook::after_backward<P> || hook::forward_scope<P> || hook::ready<P>;
  }
  std::shared_ptr<void> in_fit_scope(std::shared_ptr<void> outer) override {
    return in_scope<hooks::fit_scope>(std::move(outer));
  }
  std::shared_ptr<void> in_forward_scope(std::shared_ptr<void> outer) override {
    return in_scope<hooks::forward_scope>(std::move(outer));
  }
  void before_backward(Loss& loss) override { call<hooks::before_backward>(loss); }
  bool ready() override { return says<hooks::ready>(true); }
  void after_backward(Gradients& gradients) override { call<hooks::after_backward>(gradients); }
  void before_close() override { call<hooks::before_close>(); }
  void scale_gradients(Factor& factor) override { call<hooks::scale_gradients>(factor); }
  void reduce_gradients(Gradients& gradients) override { call<hooks::reduce_gradients>(gradients); }
  void before_step(Gradients& gradients) override { call<hooks::before_step>(gradients); }
  void after_window(const Step& step) override { call<hooks::after_window>(step); }
  void after_step(const Step& step) override { call<hooks::after_step>(step); }
  void before_boundary() override { call<hooks::before_boundary>(); }
  void on_validation(const Validation& validation) override { call<hooks::on_validation>(validation); }
  void at_boundary() override { call<hooks::at_boundary>(); }
  bool others_continue() override { return says<hooks::others_continue>(false); }
  void on_epoch_begin(std::int64_t epoch) override { call<hooks::on_epoch_begin>(epoch); }
  void on_epoch_end(std::int64_t epoch) override { call<hooks::on_epoch_end>(epoch); }
  void state(Archive& archive) override {
    if constexpr (hook::state<P> && requires { std::string_view(policy.name); }) archive(policy.name, policy);
  }

  P policy;

 private:
  template <class Hook, class... Arguments>
  static void check() {
    if constexpr (Hook::template in<P>) static_cast<void>(&Hook::template call<P, Arguments...>);
  }
  template <class Hook>
  static void check_says() {
    if constexpr (Hook::template in<P>) {
      constexpr bool says = says_anything<Hook>;
      static_assert(says, "policy: ready must be callable as bool ready(), others_continue as bool others_continue()");
    }
  }
  template <class Hook>
  static void check_gives() {
    if constexpr (Hook::template in<P>) {
      constexpr bool gives = gives_anything<Hook>;
      static_assert(gives, "policy: forward_scope must give back the guard that is held, and fit_scope as well");
    }
  }
  template <class Hook>
  static constexpr bool says_anything = requires(P& p) {
    { Hook::call(p) } -> std::convertible_to<bool>;
  };
  template <class Hook>
  static constexpr bool gives_anything = requires(P& p) {
    requires !std::is_void_v<decltype(Hook::call(p))>;
  };

  template <class Hook, class... Arguments>
  void call(Arguments&... arguments) {
    if constexpr (Hook::template in<P>) Hook::call(policy, arguments...);
  }
  template <class Hook>
  bool says(bool otherwise) {
    if constexpr (Hook::template in<P>)
      if constexpr (says_anything<Hook>) return Hook::call(policy);
    return otherwise;
  }
  template <class Hook>
  std::shared_ptr<void> in_scope(std::shared_ptr<void> outer) {
    if constexpr (Hook::template in<P>) {
      if constexpr (gives_anything<Hook>) {
        struct Scope {
          std::shared_ptr<void> outer;
          std::decay_t<decltype(Hook::call(std::declval<P&>()))> guard;
        };
        return std::shared_ptr<Scope>(new Scope{std::move(outer), Hook::call(policy)});
      }
    }
    return outer;
  }
};

/// The policies of a Trainer, whose hooks are called in their order.
class PolicyList {
 public:
  void add(std::unique_ptr<AnyPolicy> policy);
  AnyPolicy& operator[](std::size_t place) const { return *policies_[place]; }

  template <class... Parameters, class... Arguments>
  void all(void (AnyPolicy::*hook)(Parameters...), Arguments&&... arguments) {
    for (auto& policy : policies_) (policy.get()->*hook)(arguments...);
  }
  /// Begins with policies of several processes, after which the others may evaluate what is then the same on all.
  void processes_first(void (AnyPolicy::*hook)(std::int64_t), std::int64_t epoch);

  /// None that has a say is against it. All are asked, whatever the others say.
  bool ready();
  bool others_continue();

  /// The guards that this hook of all gives, which are let go with what this returns, the last one first.
  std::shared_ptr<void> scopes(std::shared_ptr<void> (AnyPolicy::*hook)(std::shared_ptr<void>)) const;

  /// Each under its name. If one cannot load, all are as before.
  void state(Archive& archive);
  /// Saves or loads only the policies that see micro-batches.
  void state_in_window(Archive& archive);

 private:
  void go_back(const Archive& before);

  std::vector<std::unique_ptr<AnyPolicy>> policies_;
};

inline void PolicyList::add(std::unique_ptr<AnyPolicy> policy) { policies_.push_back(std::move(policy)); }

inline void PolicyList::processes_first(void (AnyPolicy::*hook)(std::int64_t), std::int64_t epoch) {
  for (const bool of_processes : {true, false})
    for (auto& policy : policies_)
      if (policy->of_processes() == of_processes) (policy.get()->*hook)(epoch);
}

inline bool PolicyList::ready() {
  bool all = true;
  for (auto& policy : policies_) all = policy->ready() && all;
  return all;
}

inline bool PolicyList::others_continue() {
  bool any = false;
  for (auto& policy : policies_) any = policy->others_continue() || any;
  return any;
}

inline std::shared_ptr<void> PolicyList::scopes(std::shared_ptr<void> (AnyPolicy::*hook)(std::shared_ptr<void>)) const {
  std::shared_ptr<void> scopes;
  for (auto& policy : policies_) scopes = (policy.get()->*hook)(std::move(scopes));
  return scopes;
}

inline void PolicyList::state(Archive& archive) {
  if (archive.loading()) {
    auto before = Archive::of_references();
    all(&AnyPolicy::state, before);
    archive.if_not_all_fit([this, before] { go_back(before); });
  }
  all(&AnyPolicy::state, archive);
}

inline void PolicyList::state_in_window(Archive& archive) {
  for (auto& policy : policies_)
    if (policy->sees_micro_batches()) policy->state(archive);
}

inline void PolicyList::go_back(const Archive& before) {
  auto archive = Archive::to_go_back(before);
  try {
    all(&AnyPolicy::state, archive);
  } catch (...) {  // one that never loads: those before it are back, those after it have not changed
  }
}

}  // namespace gradaccum::detail
