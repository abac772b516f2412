// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/data/tensor_batches.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/memory/copied_to.hpp>

#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace gradaccum::data {

GRADACCUM_INLINE TensorBatches::TensorBatches(at::Tensor inputs, at::Tensor targets, TensorBatchesOptions options)
    : inputs_(std::move(inputs)), targets_(std::move(targets)), options_(options) {
  TORCH_CHECK(inputs_.defined() && targets_.defined() && inputs_.dim() > 0 && targets_.dim() > 0,
              "TensorBatches: inputs and targets must have a first dimension, their rows");
  TORCH_CHECK(inputs_.size(0) == targets_.size(0), "TensorBatches: inputs and targets must have as many rows, got ",
              inputs_.size(0), " and ", targets_.size(0));
  TORCH_CHECK(options_.batch_size >= 1, "TensorBatches: batch_size must be >= 1, got ", options_.batch_size);
  share().check("TensorBatches");
}

GRADACCUM_INLINE std::int64_t TensorBatches::all_of(std::int64_t /*epoch*/) const {
  const auto full = rows() / options_.batch_size;
  return full + (!options_.drop_last && rows() % options_.batch_size != 0);
}

GRADACCUM_INLINE Batch TensorBatches::batch_at(std::int64_t epoch, std::int64_t number) const {
  const auto from = number * options_.batch_size;
  const auto count = std::min(options_.batch_size, rows() - from);
  if (!options_.shuffle) return {inputs_.narrow(0, from, count), targets_.narrow(0, from, count)};
  if (!order_.defined() || order_epoch_ != epoch) make_order(epoch);
  const auto rows = order_.narrow(0, from, count);
  return {inputs_.index_select(0, rows), targets_.index_select(0, rows.to(targets_.device()))};
}

GRADACCUM_INLINE void TensorBatches::make_order(std::int64_t epoch) const {
  auto generator = detail::epoch_generator(options_.seed, epoch);
  order_ = detail::copied_to(inputs_.device(), at::randperm(rows(), generator, at::TensorOptions(at::kLong)));
  order_epoch_ = epoch;
}

}  // namespace gradaccum::data
