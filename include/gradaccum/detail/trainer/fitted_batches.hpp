// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/arguments.hpp>

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace gradaccum {
struct FitMemory;
}

namespace gradaccum::detail {

class Loop;

/// A Trainer's batches in micro-batches that fit into memory, as `FitMemory` says.
class FittedBatches final : public BatchDivider {
 public:
  FittedBatches(Loop& loop, FitMemory& memory);
  /// When all policies are attached.
  void begin();
  std::int64_t end_of_window(const AnyBatch& batch, std::int64_t from) const override;
  void run(const AnyBatch& batch, std::int64_t from, std::int64_t to, MicroBatch micro_batch) override;
  void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const override;

 private:
  Loop& loop_;
  FitMemory& memory_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/fit_memory.ipp>
#endif
