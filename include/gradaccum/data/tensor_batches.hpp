// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace gradaccum::data {

struct TensorBatchesOptions {
  std::int64_t batch_size = 64;  ///< rows a batch, >= 1
  bool shuffle = false;          ///< a new order every epoch
  std::uint64_t seed = 0;        ///< the order depends on the seed and the epoch alone
  bool drop_last = false;        ///< leave out a last, smaller batch
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
/// `inputs` and `targets` have the same number of rows (dim 0). Not shuffled, a batch is a view of them. One loop at a
/// time: each `begin()` starts the next epoch, or the rest of one after `load_state`.
///
/// @note Does not synchronise with the device, apart from copying the epoch's order to it.
class TensorBatches {
 public:
  /// Where a run is: enough to go on from there with the same batches.
  struct State {
    std::int64_t epoch = 0;  ///< of the loop that runs, or of the next one
    std::int64_t batch = 0;  ///< the next one in it
    bool operator==(const State&) const = default;
  };

  TensorBatches(at::Tensor inputs, at::Tensor targets, TensorBatchesOptions options = {})
      : inputs_(std::move(inputs)), targets_(std::move(targets)), options_(options) {
    TORCH_CHECK(inputs_.defined() && targets_.defined() && inputs_.dim() > 0 && targets_.dim() > 0,
                "TensorBatches: inputs and targets must have a first dimension, their rows");
    TORCH_CHECK(inputs_.size(0) == targets_.size(0), "TensorBatches: inputs and targets must have as many rows, got ",
                inputs_.size(0), " and ", targets_.size(0));
    TORCH_CHECK(options_.batch_size >= 1, "TensorBatches: batch_size must be >= 1, got ", options_.batch_size);
  }

  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    using pointer = Batch*;
    using reference = Batch&;

    explicit Iterator(TensorBatches& batches) : batches_(&batches), loop_(batches.loops_) { ++*this; }
    Batch& operator*() const { return batch_; }
    Batch* operator->() const { return &batch_; }
    Iterator& operator++() {
      TORCH_CHECK(batches_->loops_ == loop_, "TensorBatches: a second loop began inside this one; give it a copy");
      if (!batches_->next(batch_)) batches_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return batches_ == nullptr; }

   private:
    TensorBatches* batches_;
    std::int64_t loop_;
    mutable Batch batch_;  // an input iterator gives what it holds, whether it is const or not
  };

  Iterator begin() {
    if (state_.batch > 0 && !resumed_) state_ = {state_.epoch + 1, 0};  // the last loop was left early
    resumed_ = false;
    ++loops_;
    order_ = options_.shuffle ? order_of(state_.epoch) : at::Tensor();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  std::int64_t rows() const { return inputs_.size(0); }
  /// Batches an epoch.
  std::int64_t size() const {
    const auto full = rows() / options_.batch_size;
    return full + (!options_.drop_last && rows() % options_.batch_size != 0);
  }

  const State& state() const { return state_; }
  /// The next loop goes on from here.
  void load_state(const State& state) {
    TORCH_CHECK(state.epoch >= 0 && state.batch >= 0 && state.batch <= size(),
                "TensorBatches: a state must have epoch ", ">= 0 and a batch of 0 to ", size(), ", got ", state.epoch,
                " and ", state.batch);
    state_ = state;
    resumed_ = true;
  }

 private:
  /// The generator looks at 32 bits of its seed: all bits of both numbers go into them (splitmix64's mixing step).
  static std::uint64_t mixed(std::uint64_t seed, std::uint64_t epoch) {
    auto z = seed + 0x9E3779B97F4A7C15u * (epoch + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) >> 32;
  }

  at::Tensor order_of(std::int64_t epoch) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(mixed(options_.seed, static_cast<std::uint64_t>(epoch)));
    return at::randperm(rows(), generator, at::TensorOptions(at::kLong)).to(inputs_.device());
  }

  bool next(Batch& batch) {
    if (state_.batch == size()) {
      state_ = {state_.epoch + 1, 0};
      return false;
    }
    const auto from = state_.batch * options_.batch_size;
    const auto count = std::min(options_.batch_size, rows() - from);
    if (!order_.defined()) {
      batch = {inputs_.narrow(0, from, count), targets_.narrow(0, from, count)};
    } else {
      const auto rows = order_.narrow(0, from, count);
      batch = {inputs_.index_select(0, rows), targets_.index_select(0, rows.to(targets_.device()))};
    }
    ++state_.batch;
    return true;
  }

  at::Tensor inputs_, targets_, order_;
  TensorBatchesOptions options_;
  State state_;
  std::int64_t loops_ = 0;
  bool resumed_ = false;
};

}  // namespace gradaccum::data
