// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/loops.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::data {

/// Options for the sizes and the order of batches.
struct TensorBatchesOptions {
  std::int64_t batch_size = 64;  ///< rows per batch, >= 1
  bool shuffle = false;          ///< a new order every epoch
  std::uint64_t seed = 0;        ///< order depends on the seed and the epoch alone
  bool drop_last = false;        ///< leaves out a last, smaller batch
  std::int64_t rank = 0;         ///< every `world_size`-th batch is this rank's
  std::int64_t world_size = 1;   ///< number of ranks that share the batches
};

/// A batch, with the member names of `torch::data::Example`.
struct Batch {
  at::Tensor data, target;
};

/// Batches of two tensors in memory: an epoch per loop, and an `index_select` per tensor and batch, on its own device.
///
///     ga::data::TensorBatches batches(images, labels, {.batch_size = 64, .shuffle = true, .seed = 0});
///     for (int epoch = 0; epoch < 20; ++epoch)
///       for (auto& batch : batches) {
///         auto loss = torch::cross_entropy_loss(model->forward(batch.data), batch.target);
///         loss.backward();
///       }
///
/// With `rank` and `world_size` of a `ProcessGroup`, all ranks make the same batches, those of one process, and take
/// them in turn; some may have one less.
///
/// `inputs` and `targets` have the same number of rows (dim 0). Without shuffling, a batch is a view of them. Only one
/// loop runs at a time: each `begin()` starts the next epoch, or the rest of one after `load_state`.
///
/// @note Does not wait for the device: an epoch's order goes to CUDA from pinned memory.
class TensorBatches : public EpochLoops<Batch> {
 public:
  TensorBatches(at::Tensor inputs, at::Tensor targets, TensorBatchesOptions options = {});

  std::int64_t rows() const { return inputs_.size(0); }
  /// The number of this rank's batches per epoch.
  std::int64_t size() const { return share().of(all_of(0)); }

 private:
  detail::ShareOfRank share() const override { return {options_.rank, options_.world_size}; }
  GRADACCUM_INLINE std::int64_t all_of(std::int64_t epoch) const override;
  GRADACCUM_INLINE Batch batch_at(std::int64_t epoch, std::int64_t number) const override;

  at::Tensor inputs_, targets_;
  mutable at::Tensor order_;  // rows in the order of `order_epoch_`
  mutable std::int64_t order_epoch_ = 0;
  TensorBatchesOptions options_;
};

}  // namespace gradaccum::data

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/data/data.ipp>
#endif
