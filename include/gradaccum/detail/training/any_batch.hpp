// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>

namespace gradaccum::detail {

/// The Trainer's interface to a batch of any type.
class AnyBatch {
 public:
  virtual ~AnyBatch() = default;
  virtual std::int64_t samples() const = 0;
  virtual std::string fingerprint() const = 0;
  virtual std::string layout() const = 0;  ///< dtypes and shapes of all tensors; empty if they are unknown
  virtual Loss loss() const = 0;           ///< runs the objective

  /// Returns true if `FitMemory` can divide the batch. The functions below throw if it cannot.
  virtual bool is_divisible() const = 0;
  virtual std::int64_t rows() const = 0;
  virtual RowKind kind() const = 0;
  virtual void part(std::int64_t from, std::int64_t to, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

[[noreturn]] inline void cannot_be_divided(const std::type_info& type) {
  TORCH_CHECK(false,
              "FitMemory: a batch must be divisible: a Tensor, a pair, tuple or map by names of Tensors, a struct of "
              "only .data and "
              ".target, or a vector of samples that are not Tensors; got ",
              name_of_class(type),
              "; declare slice(batch, from, to), which returns those samples, and batch_size(batch) beside that class");
}

template <class Batch, class Model, class Objective>
class BatchOf final : public AnyBatch {
 public:
  BatchOf(Batch& batch, Model& model, Objective& objective) : batch_(batch), model_(model), objective_(objective) {}
  std::int64_t samples() const override { return samples_of(batch_); }
  std::string fingerprint() const override { return fingerprint_of(batch_); }
  std::string layout() const override {
    if constexpr (tells_its_tensors<Own> || holds_tensors_only<Own> || std::same_as<Own, std::vector<at::Tensor>>)
      return layout_text(tensors_of(batch_));
    else
      return "";
  }
  Loss loss() const override {
    constexpr bool is_objective = std::is_invocable_r_v<Loss, Objective&, Model&, Batch&>;
    static_assert(is_objective,
                  "Trainer: the objective must be callable as objective(model, batch), with both as they were given, "
                  "and return a Tensor or a ga::Loss");
    if constexpr (is_objective) {
      using Result = std::remove_cvref_t<std::invoke_result_t<Objective&, Model&, Batch&>>;
      if constexpr (std::derived_from<Result, at::Tensor>) {  // a mean over the batch's samples
        const std::int64_t number = samples();                // before the objective can move the batch's tensors away
        return Loss(std::invoke(objective_, model_, batch_), number);
      } else {
        return std::invoke(objective_, model_, batch_);
      }
    }
  }

  bool is_divisible() const override { return divisible; }
  std::int64_t rows() const override {
    return divided<std::int64_t>([](auto& batch) { return rows_of(batch); });
  }
  RowKind kind() const override {
    return divided<RowKind>([](auto& batch) { return kind_of_rows(batch); });
  }
  void part(std::int64_t from, std::int64_t to, c10::function_ref<void(const AnyBatch&)> use) const override {
    divided<void>([&](auto& batch) {
      Batch rows = narrowed(batch, from, to - from);
      use(BatchOf(rows, model_, objective_));
    });
  }

 private:
  using Own = std::remove_const_t<Batch>;
  /// Excludes a vector of tensors, which may be samples, or inputs and targets.
  static constexpr bool divisible = has_rows<Own> && !std::same_as<Own, std::vector<at::Tensor>>;

  template <class Result>
  Result divided(auto&& find) const {
    if constexpr (divisible)
      return find(batch_);
    else
      cannot_be_divided(typeid(Batch));
  }

  Batch& batch_;
  Model& model_;
  Objective& objective_;
};

/// The Trainer's interface to a range of batches of any type, which it iterates over once per epoch.
class AnyBatches {
 public:
  virtual ~AnyBatches() = default;
  virtual std::optional<std::int64_t> number() const = 0;  ///< number of batches, if the range has a size()
  /// Returns the maximum over ranks of the batches in an epoch, counted from the current or next one, if it is known.
  virtual std::optional<std::int64_t> most_batches(std::int64_t epochs_ahead, bool alone) const = 0;
  virtual const void* address() const = 0;  ///< address of the user's range
  virtual bool has_state() const = 0;
  virtual void state(Archive& archive) = 0;
  /// Calls `visit` with each batch, until it returns false. Returns true if there are no more batches.
  virtual bool for_each(c10::function_ref<bool(const AnyBatch&)> visit) = 0;
};

template <class Batches, class Model, class Objective>
class BatchesOf final : public AnyBatches {
 public:
  BatchesOf(Batches& batches, Model& model, Objective& objective)
      : batches_(batches), model_(model), objective_(objective) {}
  std::optional<std::int64_t> number() const override { return batches_of(batches_); }
  std::optional<std::int64_t> most_batches(std::int64_t epochs_ahead, bool alone) const override {
    if constexpr (requires { batches_.most_batches(epochs_ahead); })
      return batches_.most_batches(epochs_ahead);
    else
      return alone ? number() : std::nullopt;
  }
  const void* address() const override { return std::addressof(batches_); }
  bool has_state() const override { return saves_itself; }
  void state(Archive& archive) override {
    if constexpr (saves_itself) archive("batches", batches_);
  }
  bool for_each(c10::function_ref<bool(const AnyBatch&)> visit) override {
    for (auto&& batch : batches_)
      if (!visit(BatchOf(batch, model_, objective_))) return false;
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
  /// Returns the end, exclusive, of the rows that belong to the window that is open at row `from`.
  virtual std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const = 0;
  /// Trains on these rows, which belong to one window.
  virtual void run(const AnyBatch& batch, std::int64_t from, std::int64_t to) = 0;
  /// Calls `use` with each part of a batch, for evaluation.
  virtual void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

}  // namespace gradaccum::detail
