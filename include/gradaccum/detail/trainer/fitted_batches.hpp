// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/trainer/any_batches.hpp>
#include <gradaccum/detail/trainer/batch_divider.hpp>
#include <gradaccum/detail/trainer/parts.hpp>

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace gradaccum {
struct FitMemory;
class TrainerBase;
}  // namespace gradaccum

namespace gradaccum::detail {

/// A Trainer's batches in micro-batches that fit into memory, as `FitMemory` says; it is the Trainer's friend.
class FittedBatches final : public BatchDivider {
 public:
  FittedBatches(TrainerBase& trainer, FitMemory& memory);
  /// When all policies are attached.
  void begin();
  bool train(const AnyBatch& batch) override;
  void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const override;

 private:
  std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const;
  void run_window(const AnyBatch& batch, std::int64_t from, std::int64_t to);
  bool has_all_updates() const;

  TrainerBase& trainer_;
  TrainerParts& parts_;
  FitMemory& memory_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/fitted_batches.ipp>
#endif
