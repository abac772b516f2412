// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/data/rows.hpp>
#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/fitting/row_kind.hpp>
#include <gradaccum/loss.hpp>

#include <c10/util/FunctionRef.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
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

/// `loss_of(batch)` runs the objective.
template <class Batch, class LossOf>
class BatchOf final : public AnyBatch {
 public:
  BatchOf(Batch& batch, const LossOf& loss_of) : batch_(batch), loss_of_(loss_of) {}
  std::int64_t samples() const override { return samples_of(batch_); }
  std::string fingerprint() const override { return fingerprint_of(batch_); }
  Loss loss() const override { return loss_of_(batch_); }

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
      use(BatchOf(rows, loss_of_));
    } else {
      cannot_be_divided(typeid(Batch));
    }
  }

 private:
  using Own = std::remove_const_t<Batch>;
  /// Tensors in a vector may be samples, or inputs and targets: nobody can tell.
  static constexpr bool divisible = has_rows<Own> && !std::same_as<Own, std::vector<at::Tensor>>;

  Batch& batch_;
  const LossOf& loss_of_;
};

/// A range of batches, of whatever type, which is gone through once an epoch.
class AnyBatches {
 public:
  virtual ~AnyBatches() = default;
  virtual std::optional<std::int64_t> number() const = 0;  ///< where the range tells
  virtual const void* address() const = 0;                 ///< of the user's range
  virtual bool has_state() const = 0;
  virtual void state(Archive& archive) = 0;
  /// Until there are no more, or `visit` says that it is enough. True in the first case.
  virtual bool for_each(c10::function_ref<bool(const AnyBatch&)> visit) = 0;
};

template <class Batches, class LossOf>
class BatchesOf final : public AnyBatches {
 public:
  BatchesOf(Batches& batches, const LossOf& loss_of) : batches_(batches), loss_of_(loss_of) {}
  std::optional<std::int64_t> number() const override { return batches_of(batches_); }
  const void* address() const override { return std::addressof(batches_); }
  bool has_state() const override { return saves_itself; }
  void state(Archive& archive) override {
    if constexpr (saves_itself) archive("batches", batches_);
  }
  bool for_each(c10::function_ref<bool(const AnyBatch&)> visit) override {
    for (auto&& batch : batches_)
      if (!visit(BatchOf(batch, loss_of_))) return false;
    return true;
  }

 private:
  static constexpr bool saves_itself = requires(Batches & batches, Archive& archive) { batches.state(archive); };

  Batches& batches_;
  const LossOf& loss_of_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/any_batches.ipp>
#endif
