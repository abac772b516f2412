// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/data/length_buckets.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/batch_on_device.hpp>
#include <gradaccum/detail/memory/copied_to.hpp>

#include <ATen/core/Generator.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace gradaccum::detail {

/// Cuts an order of sequences into batches of similar lengths.
class LengthCuts {
 public:
  using Rows = std::vector<std::int64_t>;

  /// Takes either `batch_size` or `tokens`; the other is 0. `mega_batch` is the number of batches sorted together; 0
  /// sorts all. A short list sorts a quarter of it, but at least 4 batches, so that two epochs have different batches.
  LengthCuts(const PaddedSequences& sequences, std::int64_t batch_size, std::int64_t tokens, std::int64_t mega_batch)
      : sequences_(sequences), by_tokens_(tokens > 0), room_(std::max(batch_size, tokens)) {
    std::int64_t all = 0;
    for (std::int64_t row = 0; row < sequences.size(); ++row) all += weight(row);
    const auto together = std::min(mega_batch, std::max<std::int64_t>(all / room_ / 4, 4));
    mega_room_ = mega_batch == 0 || all / room_ < together ? all : room_ * together;
  }

  /// Cuts `order` into batches, the longest sequence first in each. By `batch_size`, only the last one is smaller.
  std::vector<Rows> operator()(Rows order) const {
    std::vector<Rows> batches;
    for (auto from = order.begin(); from != order.end();) {
      auto to = from;
      for (auto left = mega_room_; to != order.end() && weight(*to) <= left; ++to) left -= weight(*to);
      std::stable_sort(from, to, [&](auto a, auto b) { return sequences_.length(a) > sequences_.length(b); });
      while (from != to) {
        const auto batch = from;
        from += std::min<std::int64_t>(to - from, room_ / weight(*from));
        batches.emplace_back(batch, from);
      }
    }
    return batches;
  }

 private:
  std::int64_t weight(std::int64_t row) const { return by_tokens_ ? sequences_.padded_length(row) : 1; }

  const PaddedSequences& sequences_;
  bool by_tokens_;
  std::int64_t room_, mega_room_;  // capacity of a batch and of a mega-batch, in sequences or elements
};

/// The numbers [0, count), shuffled or not.
GRADACCUM_INLINE std::vector<std::int64_t> in_order(std::int64_t count, bool shuffle, at::Generator& generator) {
  const at::TensorOptions numbers(at::kLong);
  const auto order = shuffle ? at::randperm(count, generator, numbers) : at::arange(count, numbers);
  return {order.data_ptr<std::int64_t>(), order.data_ptr<std::int64_t>() + count};
}

}  // namespace gradaccum::detail

namespace gradaccum::data {

GRADACCUM_INLINE LengthBuckets::LengthBuckets(std::vector<at::Tensor> sequences, at::Tensor targets,
                                              LengthBucketsOptions options)
    : sequences_("sequences", "padding", std::move(sequences), options.padding, options.pad_to_multiple_of),
      targets_(std::move(targets)),
      options_(options) {
  TORCH_CHECK(targets_.defined() && targets_.dim() > 0, "LengthBuckets: targets must have a first dimension, rows");
  check(targets_.size(0));
}

GRADACCUM_INLINE LengthBuckets::LengthBuckets(std::vector<at::Tensor> sequences, std::vector<at::Tensor> targets,
                                              LengthBucketsOptions options)
    : sequences_("sequences", "padding", std::move(sequences), options.padding, options.pad_to_multiple_of),
      token_targets_(std::in_place, "targets", "target_padding", std::move(targets), options.target_padding,
                     options.pad_to_multiple_of),
      options_(options) {
  check(token_targets_->size());
}

GRADACCUM_INLINE std::int64_t LengthBuckets::all_of(std::int64_t epoch) const {
  return static_cast<std::int64_t>(batches_of(epoch).size());
}

GRADACCUM_INLINE void LengthBuckets::check(std::int64_t targets) const {
  TORCH_CHECK(rows() == targets, "LengthBuckets: sequences and targets must be as many, got ", rows(), " and ",
              targets);
  const auto [least, most] = std::minmax(options_.batch_size, options_.tokens);
  TORCH_CHECK(least == 0 && most >= 1,
              "LengthBuckets: one of batch_size and tokens must be >= 1, and the other left out, got ",
              options_.batch_size, " and ", options_.tokens);
  TORCH_CHECK(!options_.drop_last || options_.batch_size > 0,
              "LengthBuckets: drop_last goes with batch_size; a budget of tokens has no size to fall short of");
  share().check("LengthBuckets");
  TORCH_CHECK(options_.mega_batch >= 1, "LengthBuckets: mega_batch must be >= 1, got ", options_.mega_batch);
  for (std::int64_t row = 0; row < rows(); ++row) {
    TORCH_CHECK(sequences_.length(row) > 0, "LengthBuckets: a sequence must have an element, number ", row,
                " has none; leave it out");
    TORCH_CHECK(options_.tokens == 0 || sequences_.padded_length(row) <= options_.tokens,
                "LengthBuckets: a sequence must fit into tokens = ", options_.tokens, ", number ", row, " has length ",
                sequences_.padded_length(row), "; cut it, leave it out, or raise tokens");
  }
}

GRADACCUM_INLINE const std::vector<LengthBuckets::Rows>& LengthBuckets::batches_of(std::int64_t epoch) const {
  if (!options_.shuffle) epoch = 0;  // all epochs are the same
  if (cut_epoch_ == epoch) return batches_;
  auto generator = detail::epoch_generator(options_.seed, epoch);
  const detail::LengthCuts cut(sequences_, options_.batch_size, options_.tokens,
                               options_.shuffle ? options_.mega_batch : 0);
  auto batches = cut(detail::in_order(rows(), options_.shuffle, generator));
  const auto full = static_cast<std::size_t>(options_.batch_size);
  if (options_.drop_last && !batches.empty() && batches.back().size() < full) batches.pop_back();
  std::vector<Rows> ordered;
  for (auto i : detail::in_order(static_cast<std::int64_t>(batches.size()), options_.shuffle, generator))
    ordered.push_back(std::move(batches[static_cast<std::size_t>(i)]));
  batches_ = std::move(ordered);
  cut_epoch_ = epoch;
  return batches_;
}

GRADACCUM_INLINE SequenceBatch LengthBuckets::batch_at(std::int64_t epoch, std::int64_t number) const {
  const auto& rows = batches_of(epoch)[static_cast<std::size_t>(number)];
  SequenceBatch batch;
  batch.data = sequences_.padded(rows);
  batch.lengths = sequences_.lengths(rows);
  batch.indices = at::tensor(rows);
  batch.tokens = batch.lengths.sum().item<std::int64_t>();
  batch.target = token_targets_ ? token_targets_->padded(rows)
                                : targets_.index_select(0, detail::copied_to(targets_.device(), batch.indices));
  if (token_targets_) batch.target_lengths = token_targets_->lengths(rows);
  return batch;
}

GRADACCUM_INLINE std::vector<at::Tensor> batch_tensors(const SequenceBatch& batch) {
  return {batch.data, batch.target, batch.lengths, batch.target_lengths, batch.indices};
}

GRADACCUM_INLINE SequenceBatch SequenceBatch::narrow(std::int64_t from, std::int64_t count) const {
  SequenceBatch part = *this;
  part.lengths = lengths.narrow(0, from, count);
  part.indices = indices.narrow(0, from, count);
  part.tokens = part.lengths.sum().item<std::int64_t>();
  const auto longest = [](const at::Tensor& of) { return of.numel() > 0 ? of.max().item<std::int64_t>() : 0; };
  part.data = data.narrow(0, from, count).narrow(1, 0, longest(part.lengths));
  part.target = target.narrow(0, from, count);
  if (!target_lengths.defined()) return part;
  part.target_lengths = target_lengths.narrow(0, from, count);
  part.target = part.target.narrow(1, 0, longest(part.target_lengths));
  return part;
}

GRADACCUM_INLINE SequenceBatch SequenceBatch::to(at::Device device) const {
  SequenceBatch there = *this;
  there.data = detail::brought_to(device, data);
  there.target = detail::brought_to(device, target);
  return there;
}

}  // namespace gradaccum::data
