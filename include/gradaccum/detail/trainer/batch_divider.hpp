// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/FunctionRef.h>

namespace gradaccum::detail {

class AnyBatch;

/// Has a Trainer's batches go in parts.
class BatchDivider {
 public:
  virtual ~BatchDivider() = default;
  /// Trains with the whole batch. True if the parameters moved.
  virtual bool train(const AnyBatch& batch) = 0;
  /// For evaluation.
  virtual void for_each_part(const AnyBatch& batch, c10::function_ref<void(const AnyBatch&)> use) const = 0;
};

}  // namespace gradaccum::detail
