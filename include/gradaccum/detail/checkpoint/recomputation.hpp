// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_plan.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
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
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Decides, while it lives, how tensors that this thread's operations save for backward are kept. Scopes nest; only the
/// innermost decides.
class SavingScope {
 public:
  SavingScope(const SavingScope&) = delete;
  SavingScope& operator=(const SavingScope&) = delete;

  /// Returns the hooks for one saved tensor. If nullptr, LibTorch keeps the tensor as it is.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;

  static SavingScope* innermost() { return top(); }

 protected:
  /// `owner` is the name that begins error messages.
  explicit SavingScope(const char* owner);
  virtual ~SavingScope();
  SavingScope* outer() const { return outer_; }

 private:
  static SavingScope*& top();

  SavingScope* outer_;
};

class LayerNormEpsilons;

/// Recomputes results of cheap operations in backward, where other operations would save them. Other tensors are kept
/// as they are outside the scope.
class [[nodiscard]] RebuildingScope final : SavingScope {
 public:
  RebuildingScope();

 private:
  class Hooks;
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

  std::uint64_t from_;
  std::shared_ptr<LayerNormEpsilons> epsilons_;
};

/// The properties of a saved and dropped tensor by which its recomputation is verified.
struct SavedSlot {
  SavedSlot(const at::Tensor& tensor, const CheckpointOptions& options);

  /// Describes how the recomputed tensor differs from the saved one; empty if they match.
  std::string difference(const SavedSlot& again, bool compare_places) const;

  TensorTraits traits;
  std::uint64_t place;    // position in the stream of random numbers
  std::uint64_t content;  // 0 unless requested
  bool needed = true;     // the operation that saved it may still unpack it
};

/// Reruns a part of the forward pass, and captures the tensors that it saves.
class Recomputation {
 public:
  struct Rules {
    CheckpointOptions options;
    bool compare_places = false;
  };

  Recomputation(const std::vector<SavedSlot>& slots, std::vector<bool> wanted, const Rules& rules);

  void run(const std::function<void()>& part);

  /// Returns the wanted tensors. Throws if the part did not repeat its forward pass; `run` then reruns it, to name the
  /// operation that differs.
  std::vector<at::Tensor> tensors(const std::function<void(Recomputation&)>& run);

  /// Returns whether this thread is recomputing.
  static bool active() { return depth() > 0; }

 private:
  struct Stop {};  // not a std::exception, which user code may catch
  class Hooks;
  class Scope;

  void add(const at::Tensor& tensor);
  void look_at(const at::Tensor& tensor);
  std::string operation_at(std::size_t count, const std::function<void(Recomputation&)>& run) const;
  static int& depth();

  const std::vector<SavedSlot>& slots_;
  std::vector<bool> wanted_;
  Rules rules_;
  std::vector<at::Tensor> tensors_;
  std::ptrdiff_t missing_;
  std::size_t next_ = 0;
  std::size_t stop_at_ = std::size_t(-1);
  bool done_ = false;
  int pass_;
  std::string difference_;
};

template <class T>
concept tuple_like = requires {
  typename std::tuple_size<T>::type;
};

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

template <class T>
concept container = std::ranges::forward_range<T> && std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>;

/// Calls `use(at::Tensor&)` for each tensor in a value, looking into optionals, pairs, tuples and containers. Other
/// values stay as they are.
template <class Value, class Use>
void for_each_tensor(Value& value, Use& use) {
  if constexpr (std::is_const_v<Value>) {
    // skips a map's keys
  } else if constexpr (std::derived_from<Value, at::Tensor>) {
    use(static_cast<at::Tensor&>(value));
  } else if constexpr (is_optional<Value>) {
    if (value) for_each_tensor(*value, use);
  } else if constexpr (tuple_like<Value>) {
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
using kept_t = decltype(lasting_copy(std::declval<const std::remove_reference_t<Input>&>()));

/// Keeps tensors as an autograd operation keeps those it saves: hooks around the checkpoint see them, outer checkpoints
/// drop them, and in-place changes are noticed.
class KeptTensors {
 public:
  KeptTensors();
  KeptTensors(const KeptTensors&) = delete;
  KeptTensors& operator=(const KeptTensors&) = delete;
  ~KeptTensors();

  /// Moves a tensor in, which leaves its handle undefined.
  void keep(at::Tensor& tensor);
  at::Tensor bring_back(std::size_t i) const;

  /// Throws if the function, just run, changed an input in place, since it could not be recomputed.
  void check_unchanged();

 private:
  struct Kept;

  std::vector<Kept> kept_;
};

/// The arguments of a call, kept so that it can be repeated.
template <class... Inputs>
class CheckpointInputs {
  static_assert((std::is_copy_constructible_v<kept_t<Inputs>> && ...),
                "checkpoint: inputs must be copyable, since the function is called with them again");

 public:
  explicit CheckpointInputs(const std::remove_reference_t<Inputs>&... inputs) : values_(lasting_copy(inputs)...) {
    auto keep = [this](at::Tensor& tensor) { tensors_.keep(tensor); };
    for_each_tensor(values_, keep);
  }
  KeptTensors& tensors() { return tensors_; }

  /// Calls `function(inputs...)` with inputs of the original types and value categories.
  template <class Function>
  void call(Function& function) const {
    auto values = values_;
    std::size_t next = 0;
    auto bring_back = [&](at::Tensor& tensor) { tensor = tensors_.bring_back(next++); };
    for_each_tensor(values, bring_back);
    std::apply([&](auto&... value) { function(as<Inputs>(value)...); }, values);
  }

 private:
  template <class Input>
  static decltype(auto) as(kept_t<Input>& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<Input>, kept_t<Input>>) {
      return static_cast<Input&&>(value);
    } else {
      return (value);
    }
  }

  std::tuple<kept_t<Inputs>...> values_;
  KeptTensors tensors_;
};

template <class Function>
concept not_options = !std::same_as<std::remove_cvref_t<Function>, CheckpointOptions>;

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

/// The modules whose running statistics must not change when the function is recomputed.
template <class Function>
std::vector<torch::nn::Module*> modules_of(Function& function) {
  if constexpr (plain_module<Function>) {
    return {const_cast<torch::nn::Module*>(static_cast<const torch::nn::Module*>(&function))};
  } else if constexpr (model<Function>) {
    auto owner = function;  // a copy that is not const
    return {&module_of(owner)};
  } else if constexpr (requires {
                         { function.modules() } -> std::same_as<std::vector<torch::nn::Module*>>;
                       }) {
    return function.modules();
  } else {
    return {};
  }
}

/// Runs a part's forward pass with a frame in place of the tensors that its operations save. `inputs` are those of the
/// part. `again` reruns it, which leaves the running statistics of `modules` unchanged.
void run_in_frame(const CheckpointOptions& options, const std::vector<torch::nn::Module*>& modules, KeptTensors& inputs,
                  std::function<void()> again, c10::function_ref<void()> forward);

/// Calls `function(inputs...)` in a frame; without one if gradients are disabled.
template <class Function, class... Inputs>
auto run_checkpointed(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  static_assert(
      !plain_module<Function> || std::is_lvalue_reference_v<Function>,
      "checkpoint: a module without an owner must outlive backward, and this one is temporary; use a holder or a "
      "shared_ptr");
  auto call = callable(function);
  if (!at::GradMode::is_enabled()) return call(std::forward<Inputs>(inputs)...);

  const auto kept = std::make_shared<CheckpointInputs<Inputs...>>(inputs...);
  const auto again = [kept, call] {
    auto as_it_was = call;  // a copy, since a call may change the function's state
    kept->call(as_it_was);
  };
  const auto run = [&](c10::function_ref<void()> forward) {
    run_in_frame(options, modules_of(function), kept->tensors(), again, forward);
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

inline std::int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.storage().nbytes());
}

/// A meta tensor with the layout and storage size of a tensor.
at::Tensor layout_of(const at::Tensor& tensor);

bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// Stands in for the part before a stage, so that the stage's input is not a leaf, as between stages.
struct GradientSink : torch::autograd::Function<GradientSink> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients);
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Stands in for the part after a stage. Its backward makes a gradient of a given layout that only the backward pass
/// owns, like the gradients between stages. `*memory` becomes a weak reference to the gradient's storage.
struct GradientSource : torch::autograd::Function<GradientSource> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                            const at::Tensor& layout, WeakStorage* memory);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients);
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/checkpoint/recomputation.ipp>
#endif
