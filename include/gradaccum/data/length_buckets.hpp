// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/epoch_order.hpp>
#include <gradaccum/detail/data/padded_sequences.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradaccum::data {

/// Which sequences make a batch, and in what order.
struct LengthBucketsOptions {
  std::int64_t batch_size = 0;          ///< sequences a batch; this or `tokens`
  std::int64_t tokens = 0;              ///< the most elements a batch has, padding included: sequences x longest
  bool shuffle = false;                 ///< other batches every epoch, in another order; else the longest first
  std::uint64_t seed = 0;               ///< the batches depend on the seed and the epoch alone
  at::Scalar padding = 0;               ///< what fills `data` up
  at::Scalar target_padding = -100;     ///< what fills token targets up: cross_entropy's ignore_index
  std::int64_t pad_to_multiple_of = 1;  ///< batches of a few lengths: `CompiledStep` has a graph for each
  bool drop_last = false;               ///< leave out the batch that has less than `batch_size` sequences
  std::int64_t mega_batch = 50;  ///< shuffled: batches sorted by length together; more: less padding, less chance
  std::int64_t rank = 0;         ///< of several processes: every `world_size`-th batch is this one's
  std::int64_t world_size = 1;   ///< how many processes share the batches
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
  /// With `data` and `target` there; to CUDA from pinned memory. The rest stays on the CPU.
  SequenceBatch to(at::Device device) const;
};

/// For `save_step` and `CompiledStep`.
std::vector<at::Tensor> batch_tensors(const SequenceBatch& batch);

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
/// @note Does not wait for the device: a batch's indices go to CUDA from pinned memory. Takes 8 bytes a
/// sequence and number: lengths, and the epoch's batches.
class LengthBuckets : public detail::EpochLoops<SequenceBatch> {
 public:
  LengthBuckets(std::vector<at::Tensor> sequences, at::Tensor targets, LengthBucketsOptions options);
  LengthBuckets(std::vector<at::Tensor> sequences, std::vector<at::Tensor> targets, LengthBucketsOptions options);

  std::int64_t rows() const { return sequences_.size(); }
  /// This rank's batches of the epoch that runs, or of the next one: with a budget of tokens, shuffled epochs may
  /// differ.
  std::int64_t size() const { return share().of(all_of(state().epoch)); }

 private:
  using Rows = std::vector<std::int64_t>;

  void check(std::int64_t targets) const;
  detail::ShareOfRank share() const override { return {options_.rank, options_.world_size}; }
  GRADACCUM_INLINE std::int64_t all_of(std::int64_t epoch) const override;
  GRADACCUM_INLINE SequenceBatch batch_at(std::int64_t epoch, std::int64_t number) const override;
  const std::vector<Rows>& batches_of(std::int64_t epoch) const;

  detail::PaddedSequences sequences_;
  at::Tensor targets_;
  std::optional<detail::PaddedSequences> token_targets_;
  LengthBucketsOptions options_;
  mutable std::optional<std::int64_t> cut_epoch_;  // what `batches_` were cut for
  mutable std::vector<Rows> batches_;
};

}  // namespace gradaccum::data

#ifndef GRADACCUM_COMPILED
#include <gradaccum/data/length_buckets.ipp>
#endif
