// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace gradaccum {

/// The bytes held by the tensors of a training, by purpose.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     });
///     trainer.fit(batches);
///     const ga::MemoryByKind bytes = trainer.memory_by_kind();
///     std::cout << bytes.parameters << " + " << bytes.optimizer_state << '\n';
///
/// Each storage counts in full and once, even if several tensors share it or a tensor views only part of it. It counts
/// as the first of these kinds that one of its tensors has. A sparse tensor counts with its indices and values, as does
/// state that is kept by rows.
struct MemoryByKind {
  std::int64_t parameters = 0;       ///< and buffers
  std::int64_t optimizer_state = 0;  ///< LibTorch's optimizers and ours; others' state counts as rest
  std::int64_t gradients = 0;        ///< `.grad`, and a window's separate sums
  std::int64_t activations = 0;      ///< tensors saved by forward for backward; known only if measured
  std::int64_t rest = 0;             ///< known only if measured: batches, losses, temporaries

  std::int64_t total() const { return parameters + optimizer_state + gradients + activations + rest; }
  bool operator==(const MemoryByKind&) const = default;
};

}  // namespace gradaccum
