// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gradaccum {

/// Bytes that the tensors of a training take, by what they are for.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     trainer.fit(batches);
///     const ga::MemoryByKind bytes = trainer.memory_by_kind();
///     std::cout << bytes.parameters << " + " << bytes.optimizer_state << '\n';
///
/// A tensor counts with all the memory that it is a view of, once, however many tensors share it: for the first of
/// these kinds that one of them is of. A sparse one counts with its indices and values, as does state that is kept by
/// rows.
struct MemoryByKind {
  std::int64_t parameters = 0;       ///< and buffers
  std::int64_t optimizer_state = 0;  ///< of LibTorch's optimizers and ours; that of others counts as the rest
  std::int64_t gradients = 0;        ///< in `.grad`, and a window's sums that are kept apart
  std::int64_t activations = 0;      ///< what a forward pass has left for backward; known to who measures it alone
  std::int64_t rest = 0;  ///< known to who measures it alone: batches, losses, what operations need meanwhile

  std::int64_t total() const { return parameters + optimizer_state + gradients + activations + rest; }
  bool operator==(const MemoryByKind&) const = default;
};

}  // namespace gradaccum
