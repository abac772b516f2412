// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/epoch_order.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gradaccum::data {

/// Which rows make a batch, and in what order.
struct TensorBatchesOptions {
  std::int64_t batch_size = 64;  ///< rows a batch, >= 1
  bool shuffle = false;          ///< a new order every epoch
  std::uint64_t seed = 0;        ///< the order depends on the seed and the epoch alone
  bool drop_last = false;        ///< leave out a last, smaller batch
  std::int64_t rank = 0;         ///< of several processes: every `world_size`-th batch is this one's
  std::int64_t world_size = 1;   ///< how many processes share the batches
};

/// A batch: the names are those of `torch::data::Example`.
struct Batch {
  at::Tensor data, target;
};

/// Batches of two tensors in memory, an epoch a loop: one `index_select` a batch, on the tensors' own device.
///
///     ga::data::TensorBatches batches(images, labels, {.batch_size = 64, .shuffle = true, .seed = 0});
///     for (int epoch = 0; epoch < 20; ++epoch)
///       for (auto& batch : batches) {
///         auto loss = torch::cross_entropy_loss(model->forward(batch.data), batch.target);
///         loss.backward();
///       }
///
/// With `rank` and `world_size` of a `ProcessGroup`, all ranks make the same order of all batches and deal them out by
/// turns: together they train with what one process would, the last batches included. Some may have one less.
///
/// `inputs` and `targets` have the same number of rows (dim 0). Not shuffled, a batch is a view of them. One loop at a
/// time: each `begin()` starts the next epoch, or the rest of one after `load_state`.
///
/// @note Does not wait for the device: an epoch's order goes to CUDA from pinned memory.
class TensorBatches : public detail::EpochLoops<Batch> {
 public:
  TensorBatches(at::Tensor inputs, at::Tensor targets, TensorBatchesOptions options = {});

  std::int64_t rows() const { return inputs_.size(0); }
  /// Batches an epoch, of this rank.
  std::int64_t size() const { return share().of(all_of(0)); }

 private:
  detail::ShareOfRank share() const override { return {options_.rank, options_.world_size}; }
  GRADACCUM_INLINE std::int64_t all_of(std::int64_t epoch) const override;
  GRADACCUM_INLINE Batch batch_at(std::int64_t epoch, std::int64_t number) const override;
  void make_order(std::int64_t epoch) const;

  at::Tensor inputs_, targets_;
  mutable at::Tensor order_;  // of the epoch in hand
  mutable std::int64_t order_epoch_ = 0;
  TensorBatchesOptions options_;
};

}  // namespace gradaccum::data

#ifndef GRADACCUM_COMPILED
#include <gradaccum/data/tensor_batches.ipp>
#endif
