// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/fitting/memory_fitter.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/detail/window/any_optimizer.hpp>
#include <gradaccum/gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace torch::optim {
class LBFGS;  // its own header would cost 9 s a translation unit
}

namespace gradaccum::detail {

/// What a Trainer holds of a model: a plain module by reference, a `ModuleHolder` or another pointer by value.
template <class M>
using kept_model_t = std::conditional_t<plain_module<M>, M, std::remove_cvref_t<M>>;

template <class O>
concept is_optimizer = std::derived_from<O, torch::optim::Optimizer> || optimizer<O>;

template <class O>
auto& pointee_of(O& optimizer) {
  if constexpr (is_optimizer<std::remove_cvref_t<O>>)
    return optimizer;
  else
    return *optimizer;
}

/// The optimizer that was given, or that is behind the pointer that was given.
template <class O>
using optimizer_t = std::remove_cvref_t<decltype(pointee_of(std::declval<std::remove_reference_t<O>&>()))>;

/// It, checked for what its type does not tell.
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

/// What a Trainer can be made of.
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

/// Keeps an owning pointer alive, where it was given for good or can be shared.
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

/// Where the first parameter lies.
template <class O>
at::Device device_of(O& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params())
      if (parameter.defined()) return parameter.device();
  return at::kCPU;
}

/// A batch of whatever type, as a Trainer sees it.
class AnyBatch {
 public:
  virtual ~AnyBatch() = default;
  virtual std::int64_t samples() const = 0;
  virtual std::string fingerprint() const = 0;
  virtual Loss loss() const = 0;  ///< what the objective says of it

  /// For `FitMemory`; the others throw where nobody knows how to divide it.
  virtual bool is_divisible() const = 0;
  virtual std::int64_t rows() const = 0;
  virtual RowKind kind() const = 0;
  virtual void part(std::int64_t from, std::int64_t to, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

/// Throws.
[[noreturn]] void cannot_be_divided(const std::type_info& type);

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
  /// Tensors in a vector may be samples, or inputs and targets: nobody can tell.
  static constexpr bool divisible = has_rows<Own> && !std::same_as<Own, std::vector<at::Tensor>>;

  Batch& batch_;
  Model& model_;
  Objective& objective_;
};

/// One pass over batches.
class BatchCursor {
 public:
  virtual ~BatchCursor() = default;
  /// The next batch, which lives until this is called again; null where there are no more.
  virtual const AnyBatch* next() = 0;
};

/// Does what a range-based `for` does: a batch is gone before the iterator moves on.
template <class Batches, class Model, class Objective>
class CursorOf final : public BatchCursor {
 public:
  CursorOf(Batches& batches, Model& model, Objective& objective)
      : place_(begin_of(batches)), end_(end_of(batches)), model_(model), objective_(objective) {}
  const AnyBatch* next() override {
    if (current_) {
      current_.reset();
      ++place_;
    }
    if (!(place_ != end_)) return nullptr;
    return &current_.emplace(place_, model_, objective_).any;
  }

 private:
  static auto begin_of(Batches& batches) {
    if constexpr (requires { batches.begin(), batches.end(); }) {  // as a range-based for prefers them
      return batches.begin();
    } else {
      using std::begin;
      return begin(batches);
    }
  }
  static auto end_of(Batches& batches) {
    if constexpr (requires { batches.begin(), batches.end(); }) {
      return batches.end();
    } else {
      using std::end;
      return end(batches);
    }
  }
  using Place = decltype(begin_of(std::declval<Batches&>()));
  using Batch = decltype(*std::declval<Place&>());
  struct Current {
    Current(Place& place, Model& model, Objective& objective) : batch(*place), any(batch, model, objective) {}
    Batch batch;
    BatchOf<std::remove_reference_t<Batch>, Model, Objective> any;
  };

  Place place_;
  decltype(end_of(std::declval<Batches&>())) end_;
  Model& model_;
  Objective& objective_;
  std::optional<Current> current_;
};

/// A range of batches, of whatever type, which is gone through once an epoch.
class AnyBatches {
 public:
  virtual ~AnyBatches() = default;
  virtual std::optional<std::int64_t> number() const = 0;  ///< where the range tells
  virtual const void* address() const = 0;                 ///< of the user's range
  virtual bool has_state() const = 0;
  virtual void state(Archive& archive) = 0;
  virtual std::unique_ptr<BatchCursor> begin() = 0;
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
  std::unique_ptr<BatchCursor> begin() override {
    return std::make_unique<CursorOf<Batches, Model, Objective>>(batches_, model_, objective_);
  }

 private:
  static constexpr bool saves_itself = requires(Batches & batches, Archive& archive) { batches.state(archive); };

  Batches& batches_;
  Model& model_;
  Objective& objective_;
};

/// Has a Trainer's batches go in parts.
class BatchDivider {
 public:
  /// Trains with a part of a batch. `begins`: it is the first of them. `may_close`: the window may end with it.
  using MicroBatch = c10::function_ref<void(const AnyBatch& part, bool begins, bool may_close)>;

  virtual ~BatchDivider() = default;
  /// The row of the batch before which the window ends that is open at row `from`.
  virtual std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const = 0;
  /// Trains with these rows, which are of one window.
  virtual void run(const AnyBatch& batch, std::int64_t from, std::int64_t to, MicroBatch micro_batch) = 0;
  /// For evaluation.
  virtual void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/arguments.ipp>
#endif
