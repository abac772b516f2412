// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/data/rows.hpp>
#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/fitting/row_kind.hpp>
#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace gradaccum::detail {

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
    if constexpr (is_objective && std::is_member_pointer_v<Objective>)
      return loss_from(std::invoke(objective_, model_, batch_));
    else if constexpr (is_objective)
      return loss_from(objective_(model_, batch_));
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

  /// A loss that does not tell its items is a mean over the batch's samples.
  template <class Result>
  Loss loss_from(Result&& result) const {
    if constexpr (std::derived_from<std::remove_cvref_t<Result>, at::Tensor>)
      return Loss(std::forward<Result>(result), samples());
    else
      return std::forward<Result>(result);
  }

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
    using std::begin;
    return begin(batches);
  }
  static auto end_of(Batches& batches) {
    using std::end;
    return end(batches);
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

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/any_batches.ipp>
#endif
