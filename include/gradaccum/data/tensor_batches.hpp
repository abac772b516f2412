// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: data

#include <gradaccum/data/epoch_order.hpp>
#include <gradaccum/detail/data/loops.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gradaccum::data {

/// Options for the sizes and the order of batches.
struct TensorBatchesOptions {
  std::int64_t batch_size = 64;  ///< rows per batch, >= 1
  bool shuffle = false;          ///< a new order every epoch
  std::uint64_t seed = 0;        ///< the order depends on the seed and the epoch only
  bool drop_last = false;        ///< leave out a last, smaller batch
  std::int64_t rank = 0;         ///< this rank, which gets every `world_size`-th batch
  std::int64_t world_size = 1;   ///< number of ranks that share the batches
};

}  // namespace gradaccum::data

namespace gradaccum::detail {

/// Computes the rows of each batch of an epoch.
class RowOrder {
 public:
  /// All `tensors` must have the same number of rows. The order is on the device of the first.
  RowOrder(const char* owner, const std::vector<at::Tensor>& tensors, const data::TensorBatchesOptions& options);

  std::int64_t rows() const { return rows_; }
  std::int64_t batches() const;
  ShareOfRank share() const { return {options_.rank, options_.world_size}; }
  /// Returns a batch's rows of a tensor.
  at::Tensor of(const at::Tensor& tensor, std::int64_t epoch, std::int64_t batch) const;

 private:
  std::int64_t rows_ = 0;
  at::Device device_ = at::kCPU;
  data::TensorBatchesOptions options_;
  mutable at::Tensor order_;  // order of `epoch_`
  mutable std::int64_t epoch_ = 0;
};

}  // namespace gradaccum::detail

namespace gradaccum::data {

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
/// Ranks. With `rank` and `world_size` of a `ProcessGroup`, all ranks form the same batches and take them in turn; some
/// may have one fewer.
///
/// `inputs` and `targets` have the same number of rows (dim 0). Without shuffling, a batch is a view of them. Only one
/// loop runs at a time: each `begin()` starts the next epoch, or the rest of one after `load_state`.
///
/// @note Does not synchronize: an epoch's order is copied to CUDA from pinned memory.
class TensorBatches : public EpochLoops<Batch> {
 public:
  TensorBatches(at::Tensor inputs, at::Tensor targets, TensorBatchesOptions options = {});

  std::int64_t rows() const { return order_.rows(); }

 private:
  detail::ShareOfRank share() const override { return order_.share(); }
  std::int64_t all_of(std::int64_t /*epoch*/) const override { return order_.batches(); }
  Batch batch_at(std::int64_t epoch, std::int64_t number) const override {
    return {order_.of(inputs_, epoch, number), order_.of(targets_, epoch, number)};
  }

  at::Tensor inputs_, targets_;
  detail::RowOrder order_;
};

/// Batches of named tensors, for example from a safetensors file. Otherwise like `TensorBatches`.
///
///     ga::data::NamedTensorBatches batches({{"x", x}, {"y", y}}, {.batch_size = 2, .shuffle = true});
///     for (auto& batch : batches) std::cout << batch.at("x").sizes() << '\n';
class NamedTensorBatches : public EpochLoops<std::map<std::string, at::Tensor>> {
  using Tensors = std::map<std::string, at::Tensor>;

 public:
  explicit NamedTensorBatches(Tensors tensors, const TensorBatchesOptions& options = {});

  std::int64_t rows() const { return order_.rows(); }

 private:
  detail::ShareOfRank share() const override { return order_.share(); }
  std::int64_t all_of(std::int64_t /*epoch*/) const override { return order_.batches(); }
  Tensors batch_at(std::int64_t epoch, std::int64_t number) const override {
    auto batch = tensors_;
    for (auto& [name, tensor] : batch) tensor = order_.of(tensor, epoch, number);
    return batch;
  }

  Tensors tensors_;
  detail::RowOrder order_;
};

}  // namespace gradaccum::data

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/data/data.ipp>
#endif
