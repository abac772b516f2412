// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// `checkpoint.hpp` includes this file, and defines the options.
namespace gradaccum {
struct CheckpointOptions;
}

namespace gradaccum::detail {

/// A scope that decides how tensors that this thread's operations save for backward are kept. Scopes nest; only the
/// innermost one decides.
class SavingScope {
 public:
  using Hooks = std::unique_ptr<torch::autograd::SavedVariableHooks>;

  /// `owner` is the name that begins error messages. `hooks` makes the hooks for one saved tensor. If it returns
  /// nullptr, LibTorch keeps the tensor as it is.
  SavingScope(const char* owner, std::function<Hooks()> hooks);
  SavingScope& operator=(SavingScope&&) = delete;
  ~SavingScope();

  Hooks hooks() const { return hooks_(); }
  static SavingScope* innermost() { return innermost_; }

 protected:
  SavingScope* outer() const { return outer_; }

 private:
  inline static thread_local SavingScope* innermost_ = nullptr;

  std::function<Hooks()> hooks_;
  SavingScope* outer_;
};

/// A scope in which results of cheap operations are recomputed in backward rather than saved for other operations.
/// Other tensors are kept as outside the scope.
class [[nodiscard]] RebuildingScope final : SavingScope {
 public:
  RebuildingScope();
  ~RebuildingScope();

 private:
  std::uint64_t from_;      // sequence number of the scope's first operation
  std::uint64_t callback_;  // records epsilons of LayerNorms
};

template <class T>
concept is_optional = std::same_as<T, std::optional<typename T::value_type>>;

template <class T>
concept container = std::ranges::forward_range<T> && std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>;

/// Calls `use(at::Tensor&)` for each tensor in a value, looking into optionals, pairs, tuples and containers. Other
/// values stay as they are.
template <class Value>
void for_each_tensor(Value& value, auto&& use) {
  if constexpr (std::is_const_v<Value>) {
    // skips a map's keys
  } else if constexpr (std::derived_from<Value, at::Tensor>) {
    use(static_cast<at::Tensor&>(value));
  } else if constexpr (is_optional<Value>) {
    if (value) for_each_tensor(*value, use);
  } else if constexpr (requires { typename std::tuple_size<Value>::type; }) {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, use), ...); }, value);
  } else if constexpr (container<Value>) {
    for (auto& part : value) for_each_tensor(part, use);
  }
}

/// Copies an input for later use. If it only refers to the caller's memory, copies that memory.
template <class Input>
std::decay_t<const Input&> lasting_copy(const Input& input) {
  return input;
}
template <class T>
std::vector<T> lasting_copy(const c10::ArrayRef<T>& input) {
  return input.vec();
}
template <class T>
std::vector<std::remove_cv_t<T>> lasting_copy(const std::span<T>& input) {
  return {input.begin(), input.end()};
}
template <class Input>
using lasting_t = decltype(lasting_copy(std::declval<const std::remove_reference_t<Input>&>()));

/// Saves tensors as an autograd operation does: enclosing hooks receive them, outer checkpoints drop them, and in-place
/// changes are detected.
class SavedInputs {
 public:
  /// Moves a tensor in, which leaves its handle undefined.
  void save(at::Tensor& tensor) { saved_.emplace_back(tensor); }
  at::Tensor unpack(std::size_t i) const;

  /// Throws if the function, just run, changed an input in place, since it could not be recomputed.
  void check_unchanged();

 private:
  struct Saved {
    explicit Saved(at::Tensor& handle)
        : version(handle), tensor(std::exchange(handle, at::Tensor()), /*is_output=*/false) {}

    TensorVersion version;
    torch::autograd::SavedVariable tensor;
  };

  std::vector<Saved> saved_;
};

/// The arguments of a call, kept so that it can be repeated.
template <class... Inputs>
class CheckpointInputs {
  static_assert((std::is_copy_constructible_v<lasting_t<Inputs>> && ...),
                "checkpoint: inputs must be copyable, since the function is called with them again");

 public:
  explicit CheckpointInputs(const std::remove_reference_t<Inputs>&... inputs) : values_(lasting_copy(inputs)...) {
    for_each_tensor(values_, [this](at::Tensor& tensor) { tensors_.save(tensor); });
  }
  SavedInputs& tensors() { return tensors_; }

  /// Calls `function(inputs...)` with inputs of the original types and value categories.
  template <class Function>
  void call(Function& function) const {
    auto values = values_;
    std::size_t next = 0;
    for_each_tensor(values, [&](at::Tensor& tensor) { tensor = tensors_.unpack(next++); });
    std::apply([&](auto&... value) { function(as<Inputs>(value)...); }, values);
  }

 private:
  template <class Input>
  static decltype(auto) as(lasting_t<Input>& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<Input>, lasting_t<Input>>) {
      return static_cast<Input&&>(value);
    } else {
      return (value);
    }
  }

  std::tuple<lasting_t<Inputs>...> values_;
  SavedInputs tensors_;
};

/// Returns a callable for the recomputation: a copy of a function, an owner of a module, or a reference to a module
/// that has no owner.
template <class Function>
auto callable(Function& function) {
  if constexpr (plain_module<Function>) {
    return [&function](auto&&... inputs) { return function.forward(std::forward<decltype(inputs)>(inputs)...); };
  } else if constexpr (model<Function>) {
    return [owner = function](auto&&... inputs) mutable {
      return (*owner).forward(std::forward<decltype(inputs)>(inputs)...);
    };
  } else {
    static_assert(std::is_copy_constructible_v<std::decay_t<Function>>,
                  "checkpoint: the function must be copyable, since it is called again later; let it hold a shared_ptr "
                  "instead of a unique_ptr");
    return std::decay_t<Function>(function);
  }
}

/// Adds a value to a list of modules if it is a module.
template <class Value>
void add_module(std::vector<torch::nn::Module*>& modules, Value& value) {
  if constexpr (model<Value>) modules.push_back(&module_of(const_cast<std::remove_const_t<Value>&>(value)));
}

/// Adds an input in the same way. It may be an empty holder or pointer, such as a missing shortcut of a block.
template <class Value>
void add_input(std::vector<torch::nn::Module*>& modules, Value& value) {
  if constexpr (model<Value> && !plain_module<Value> && std::constructible_from<bool, Value&>)
    if (!static_cast<bool>(value)) return;
  add_module(modules, value);
}

/// Runs a part's forward pass with a frame in place of the tensors that its operations save. `inputs` are the part's.
/// `again` reruns it, which leaves the buffers of `modules`, and of others that it calls, unchanged.
void run_in_frame(const CheckpointOptions& options, const std::vector<torch::nn::Module*>& modules, bool calls_others,
                  SavedInputs& inputs, std::function<void()> again, c10::function_ref<void()> forward);

/// Calls `function(inputs...)` in a frame; without one if gradients are disabled. `calls_others`: see `run_watched`.
template <bool calls_others = false, class Function, class... Inputs>
auto run_checkpointed(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  static_assert(
      !plain_module<Function> || std::is_lvalue_reference_v<Function>,
      "checkpoint: a module without an owner must outlive backward, and this one is temporary; use a holder or a "
      "shared_ptr");
  auto call = callable(function);
  if (!at::GradMode::is_enabled()) return call(std::forward<Inputs>(inputs)...);

  const auto saved = std::make_shared<CheckpointInputs<Inputs...>>(inputs...);
  const auto again = [saved, call] {
    auto as_it_was = call;  // a copy, since a call may change the function's state
    saved->call(as_it_was);
  };
  std::vector<torch::nn::Module*> modules;
  add_module(modules, function);
  (add_input(modules, inputs), ...);
  const auto run = [&](c10::function_ref<void()> forward) {
    run_in_frame(options, modules, calls_others, saved->tensors(), again, forward);
  };
  using Outputs = std::decay_t<decltype(call(std::forward<Inputs>(inputs)...))>;
  if constexpr (std::is_void_v<Outputs>) {
    run([&] { call(std::forward<Inputs>(inputs)...); });
  } else {
    std::optional<Outputs> outputs;
    run([&] { outputs.emplace(call(std::forward<Inputs>(inputs)...)); });
    return std::move(*outputs);
  }
}

}  // namespace gradaccum::detail
