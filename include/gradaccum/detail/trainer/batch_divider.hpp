// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace gradaccum::detail {

class AnyBatch;

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
