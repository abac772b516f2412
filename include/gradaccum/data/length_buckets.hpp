// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/epoch_order.hpp>
#include <gradaccum/detail/data/length_cuts.hpp>
#include <gradaccum/detail/data/padded_sequences.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::data {

struct LengthBucketsOptions {
  std::int64_t batch_size = 0;       ///< sequences a batch; this or `tokens`
  std::int64_t tokens = 0;           ///< the most elements a batch has, padding included: sequences x longest
  bool shuffle = false;              ///< other batches every epoch, in another order; else the longest first
  std::uint64_t seed = 0;            ///< the batches depend on the seed and the epoch alone
  at::Scalar padding = 0;            ///< what fills `data` up
  at::Scalar target_padding = -100;  ///< what fills token targets up: cross_entropy's ignore_index
  bool drop_last = false;            ///< leave out the batch that has less than `batch_size` sequences
  std::int64_t mega_batch = 50;      ///< shuffled: batches sorted by length together; more: less padding, less chance
  std::int64_t rank = 0;             ///< of several processes: every `world_size`-th batch is this one's
  std::int64_t world_size = 1;
};

/// A batch of sequences, the longest first.
struct SequenceBatch {
  at::Tensor data;            ///< [n, longest, …]
  at::Tensor target;          ///< [n, …], or token targets [n, longest target, …]
  at::Tensor lengths;         ///< int64 [n], on the CPU, as `pack_padded_sequence` wants them
  at::Tensor target_lengths;  ///< the same of token targets; undefined where targets are rows
  at::Tensor indices;         ///< int64 [n], on the CPU: where each was in the list
  std::int64_t tokens = 0;    ///< the sum of `lengths`

  std::int64_t rows() const { return indices.size(0); }
  /// The sequences [from, from + count), padded to the longest of these.
  SequenceBatch narrow(std::int64_t from, std::int64_t count) const;
};

/// Batches of sequences of unequal length, of about the same length each, so that little of them is padding.
///
///     std::vector<at::Tensor> texts{torch::randint(9, {7}), torch::randint(9, {30}), torch::randint(9, {8})};
///     ga::data::LengthBuckets buckets(texts, torch::tensor({0, 1, 0}), {.tokens = 32, .shuffle = true, .seed = 0});
///     for (auto& batch : buckets) {                                      // [2, 8] and [1, 30], or the other way round
///       auto mask = torch::arange(batch.data.size(1)) < batch.lengths.unsqueeze(1);
///       std::cout << batch.data.sizes() << ", padding: " << batch.data.numel() - batch.tokens << mask << '\n';
///     }
///
/// Shuffled, an epoch's random order is cut into mega-batches of 50 batches (of a quarter of a short list, of 4 at
/// least); each is sorted by length and cut into batches, and all batches are shuffled. Not shuffled, the whole list is
/// sorted, the longest first, so that what does not fit into memory shows at once; `indices` put results back in order.
/// Either way an epoch has every sequence exactly once, but for what `drop_last` leaves out.
///
/// With `rank` and `world_size` of a `ProcessGroup`, all ranks make the same batches and deal them out by turns.
///
/// `sequences`: [length, …], length >= 1, alike in dtype, device and the other dimensions; of any strides, not copied.
/// `targets`: a tensor with a row for each, or a list of tensors: token targets, which are padded too. A batch is
/// memory of its own. One loop at a time: each `begin()` starts the next epoch, or the rest of one after `load_state`.
///
/// @note Does not synchronise with the device, apart from copying a batch's indices to it. Takes 8 bytes a sequence and
/// number: lengths, and the epoch's batches.
class LengthBuckets : public detail::EpochLoops<LengthBuckets, SequenceBatch> {
 public:
  LengthBuckets(std::vector<at::Tensor> sequences, at::Tensor targets, LengthBucketsOptions options)
      : sequences_("sequences", "padding", std::move(sequences), options.padding),
        targets_(std::move(targets)),
        options_(options) {
    TORCH_CHECK(targets_.defined() && targets_.dim() > 0, "LengthBuckets: targets must have a first dimension, rows");
    check(targets_.size(0));
  }
  LengthBuckets(std::vector<at::Tensor> sequences, std::vector<at::Tensor> targets, LengthBucketsOptions options)
      : sequences_("sequences", "padding", std::move(sequences), options.padding),
        token_targets_(std::in_place, "targets", "target_padding", std::move(targets), options.target_padding),
        options_(options) {
    check(token_targets_->size());
  }

  std::int64_t rows() const { return sequences_.size(); }
  /// This rank's batches of the epoch that runs, or of the next one: with a budget of tokens, shuffled epochs may
  /// differ.
  std::int64_t size() const { return share().of(all_of(state().epoch)); }

 private:
  using Rows = detail::LengthCuts::Rows;
  friend detail::EpochLoops<LengthBuckets, SequenceBatch>;

  void check(std::int64_t targets) const;
  detail::ShareOfRank share() const { return {options_.rank, options_.world_size}; }
  std::int64_t all_of(std::int64_t epoch) const { return static_cast<std::int64_t>(batches_of(epoch).size()); }
  SequenceBatch batch_at(std::int64_t epoch, std::int64_t number) const;
  const std::vector<Rows>& batches_of(std::int64_t epoch) const;
  std::vector<Rows> cut(Rows order) const;
  Rows in_order(std::int64_t count, at::Generator& generator) const;

  detail::PaddedSequences sequences_;
  at::Tensor targets_;
  std::optional<detail::PaddedSequences> token_targets_;
  LengthBucketsOptions options_;
  mutable std::optional<std::int64_t> cut_epoch_;  // what `batches_` were cut for
  mutable std::vector<Rows> batches_;
};

inline void LengthBuckets::check(std::int64_t targets) const {
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
    TORCH_CHECK(options_.tokens == 0 || sequences_.length(row) <= options_.tokens,
                "LengthBuckets: a sequence must fit into tokens = ", options_.tokens, ", number ", row, " has length ",
                sequences_.length(row), "; cut it, leave it out, or raise tokens");
  }
}

inline const std::vector<LengthBuckets::Rows>& LengthBuckets::batches_of(std::int64_t epoch) const {
  if (!options_.shuffle) epoch = 0;  // all epochs are the same
  if (cut_epoch_ == epoch) return batches_;
  auto generator = detail::epoch_generator(options_.seed, epoch);
  auto batches = cut(in_order(rows(), generator));
  const auto full = static_cast<std::size_t>(options_.batch_size);
  if (options_.drop_last && !batches.empty() && batches.back().size() < full) batches.pop_back();
  std::vector<Rows> ordered;
  for (auto i : in_order(static_cast<std::int64_t>(batches.size()), generator))
    ordered.push_back(std::move(batches[static_cast<std::size_t>(i)]));
  batches_ = std::move(ordered);
  cut_epoch_ = epoch;
  return batches_;
}

inline std::vector<LengthBuckets::Rows> LengthBuckets::cut(Rows order) const {
  const auto mega_batch = options_.shuffle ? options_.mega_batch : 0;
  return detail::LengthCuts(sequences_.lengths(), options_.batch_size, options_.tokens, mega_batch)(std::move(order));
}

inline LengthBuckets::Rows LengthBuckets::in_order(std::int64_t count, at::Generator& generator) const {
  const at::TensorOptions numbers(at::kLong);
  const auto order = options_.shuffle ? at::randperm(count, generator, numbers) : at::arange(count, numbers);
  return Rows(order.data_ptr<std::int64_t>(), order.data_ptr<std::int64_t>() + count);
}

inline SequenceBatch LengthBuckets::batch_at(std::int64_t epoch, std::int64_t number) const {
  const auto& rows = batches_of(epoch)[static_cast<std::size_t>(number)];
  SequenceBatch batch;
  batch.data = sequences_.padded(rows);
  batch.lengths = sequences_.lengths(rows);
  batch.indices = at::tensor(rows);
  batch.tokens = batch.lengths.sum().item<std::int64_t>();
  batch.target =
      token_targets_ ? token_targets_->padded(rows) : targets_.index_select(0, batch.indices.to(targets_.device()));
  if (token_targets_) batch.target_lengths = token_targets_->lengths(rows);
  return batch;
}

inline SequenceBatch SequenceBatch::narrow(std::int64_t from, std::int64_t count) const {
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

}  // namespace gradaccum::data
