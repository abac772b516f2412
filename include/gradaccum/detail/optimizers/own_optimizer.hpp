// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/kernels/dense.hpp>
#include <gradaccum/detail/optimizers/one_pass.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/// The options, state and groups of an optimizer that LibTorch lacks.
namespace gradaccum::optim {

/// An option, and the name by which it is saved.
template <class T>
struct NamedOption {
  const char* name;
  T& value;

  bool operator==(const NamedOption& other) const { return value == other.value; }
};
/// Names an option of a group.
template <class T>
NamedOption<T> named(const char* name, T& option) {
  return {name, option};
}

/// The options of an optimizer's group. `Options::all(options)` returns a tuple of `named` options; a function `check`
/// may throw for wrong ones.
template <class Options>
struct OwnOptions : torch::optim::OptimizerCloneableOptions<Options>, detail::ArchivesItself {
  double get_lr() const override { return itself().lr(); }
  void set_lr(const double lr) override { itself().lr(lr); }

  void serialize(torch::serialize::OutputArchive& archive) const override {
    const auto write = [&]<class T>(NamedOption<const T> option) {
      if constexpr (std::is_enum_v<T>)
        archive.write(option.name, c10::IValue(static_cast<std::int64_t>(option.value)));
      else
        archive.write(option.name, c10::IValue(option.value));
    };
    for_each(write, Options::all(itself()));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    const auto read = [&]<class T>(NamedOption<T> option) {
      c10::IValue value;
      archive.read(option.name, value);
      if constexpr (std::is_enum_v<T>)
        option.value = static_cast<T>(value.toInt());
      else
        option.value = value.to<T>();
    };
    for_each(read, Options::all(itself()));
    check_itself();
  }
  void state(Archive& archive) override {
    const auto save_or_load = [&]<class T>(NamedOption<T> option) {
      const std::string name = option.name;
      if constexpr (requires { std::get<0>(option.value); }) {  // two or more numbers
        int i = 0;
        std::apply([&](auto&... number) { (archive(name + std::to_string(++i), number), ...); }, option.value);
      } else if constexpr (std::is_enum_v<T>) {
        auto number = static_cast<std::int64_t>(option.value);
        archive(name, number);
        option.value = static_cast<T>(number);
      } else {
        archive(name, option.value);
      }
    };
    for_each(save_or_load, Options::all(itself()));
    check_itself();
  }

  friend bool operator==(const Options& a, const Options& b) { return Options::all(a) == Options::all(b); }
  /// Applies LibTorch's rule to a group's options: an option with its class's default value takes the optimizer's
  /// value.
  Options inherit(const Options& from) const {
    auto options = itself();
    const Options not_given;
    const auto take = [](auto& option, auto& default_value, auto& of_optimizer) {
      if (option.value == default_value.value) option.value = of_optimizer.value;
    };
    for_each(take, Options::all(options), Options::all(not_given), Options::all(from));
    return options;
  }

 private:
  Options& itself() { return static_cast<Options&>(*this); }
  const Options& itself() const { return static_cast<const Options&>(*this); }
  void check_itself() const {
    if constexpr (requires(const Options& of) { of.check(); }) itself().check();
  }
  /// Calls `visit` with the options at each place of the tuples.
  template <class Visit, class... Tuples>
  static void for_each(const Visit& visit, Tuples... all) {
    const auto visit_place = [&]<std::size_t i>(std::integral_constant<std::size_t, i>) { visit(std::get<i>(all)...); };
    [&]<std::size_t... i>(std::index_sequence<i...>) { (visit_place(std::integral_constant<std::size_t, i>()), ...); }
    (std::make_index_sequence<std::tuple_size_v<decltype(Options::all(std::declval<Options&>()))>>());
  }
};

/// The state of a step of single elements: tensors like the parameter, and a count of steps if the step has one.
template <class Step>
class ElementState : public OwnParamState {
 public:
  static constexpr bool counts_steps = requires(Step step) { step.step; };

  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<ElementState>(*this);
  }
  bool counts() const override { return counts_steps; }
  std::vector<std::pair<std::string, at::Tensor*>> tensors() override {
    std::vector<std::pair<std::string, at::Tensor*>> all;
    for (std::size_t i = 0; i < of.size(); ++i) all.emplace_back(Step::state[i], &of[i]);
    return all;
  }
  void check(const at::Tensor& parameter) const override {
    for (std::size_t i = 0; i < of.size(); ++i) {
      TORCH_CHECK(of[i].defined(), "optimizer state: ", Step::state[i], " must exist");
      detail::checked_state(of[i], parameter, Step::state[i]);
    }
  }
  detail::StateParts parts() {
    detail::StateParts parts{.step = counts_steps ? &step() : nullptr};
    for (std::size_t i = 0; i < of.size(); ++i) parts.tensors[i] = &of[i];
    return parts;
  }

  std::array<at::Tensor, detail::number_of_states<Step>> of;  ///< in the order of their names
};

/// The groups and files of an optimizer that LibTorch lacks. `Derived` has `name` and `check(const Options&)`.
template <class Derived, class Options, class State>
class OwnGroups : public torch::optim::Optimizer {
 public:
  explicit OwnGroups(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {})
      : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<Options>(defaults)) {
    Derived::check(defaults);
    for (auto& group : groups) add_param_group(group);
  }
  explicit OwnGroups(std::vector<at::Tensor> parameters, Options defaults = {})
      : OwnGroups({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults)) {}

  /// Adds a group. As in LibTorch's optimizers, an option with its class's default value counts as not given, and takes
  /// the optimizer's value.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    const Options* options = nullptr;
    if (group.has_options()) {
      options = dynamic_cast<const Options*>(&group.options());
      TORCH_CHECK(options, Derived::name, ": the options of a group must be ", Derived::name,
                  "Options, got those of another optimizer");
      Derived::check(*options);
    }
    torch::optim::Optimizer::add_param_group(group);
    [[maybe_unused]] auto& added = param_groups().back();
    if constexpr (requires { options->inherit(*options); }) {  // a class that LibTorch does not know
      // LibTorch 2.11 has not replaced them.
      const bool is_replaced = options && !(static_cast<const Options&>(added.options()) == *options);
      if (is_replaced)
        added.set_options(std::make_unique<Options>(options->inherit(static_cast<Options&>(defaults()))));
    }
    if constexpr (requires { Derived::check_group(added); }) try {
        Derived::check_group(added);
      } catch (const c10::Error&) {
        param_groups().pop_back();
        throw;
      }
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
};

/// An optimizer that LibTorch lacks.
template <class Derived, class Options, class State>
using OwnOptimizer = OnePassOptimizer<Derived, OwnGroups<Derived, Options, State>, State>;

}  // namespace gradaccum::optim
