// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: data

#include <gradaccum/data/epoch_order.hpp>
#include <gradaccum/detail/data/loops.hpp>
#include <gradaccum/detail/data/samples.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <optional>
#include <vector>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::data {

/// Options for the sizes and the order of batches.
struct LengthBucketsOptions {
  std::int64_t batch_size = 0;          ///< sequences per batch; either this or `tokens`
  std::int64_t tokens = 0;              ///< maximum elements per batch, with padding: sequences x longest
  bool shuffle = false;                 ///< new batches in a new order every epoch; false: the longest first
  std::uint64_t seed = 0;               ///< batches depend on the seed and the epoch only
  at::Scalar padding = 0;               ///< padding of `data`
  at::Scalar target_padding = -100;     ///< padding of token targets, by default cross_entropy's ignore_index
  std::int64_t pad_to_multiple_of = 1;  ///< larger: fewer shapes, and so fewer graphs and kernels; see `summary()`
  bool drop_last = false;               ///< leave out the batch with fewer than `batch_size` sequences
  std::int64_t mega_batch = 50;  ///< if shuffled: batches sorted together; more: less padding and less randomness
  std::int64_t rank = 0;         ///< this rank, which gets every `world_size`-th batch
  std::int64_t world_size = 1;   ///< number of ranks that share the batches
};

/// A batch of sequences, longest first.
struct SequenceBatch {
  at::Tensor data;            ///< [n, longest, …]
  at::Tensor target;          ///< [n, …], or token targets [n, longest target, …]
  at::Tensor lengths;         ///< int64 [n], on the CPU, as `pack_padded_sequence` requires
  at::Tensor target_lengths;  ///< int64 [n], on the CPU, for token targets; undefined if targets are rows
  at::Tensor indices;         ///< int64 [n], on the CPU: indices of the sequences in the list
  std::int64_t tokens = 0;    ///< the sum of `lengths`
  std::int64_t multiple = 1;  ///< `pad_to_multiple_of`, which `narrow` applies, too

  std::int64_t rows() const { return indices.size(0); }
  /// Returns the sequences [from, from + count), padded to the longest of them and to the multiple.
  SequenceBatch narrow(std::int64_t from, std::int64_t count) const;
  /// Returns a copy with `data` and `target` on `device`, from pinned memory to CUDA. The rest stays on the CPU.
  SequenceBatch to(at::Device device) const;
};

/// Returns the tensors of a batch, for `save_step` and `CompiledStep`.
std::vector<at::Tensor> batch_tensors(const SequenceBatch& batch);
/// Returns the sequences [from, to) of a batch, for `FitMemory`.
SequenceBatch slice(const SequenceBatch& batch, std::int64_t from, std::int64_t to);

/// Statistics of an epoch's batches. Prints as `70 batches in 12 shapes, 9.6 % padding`.
struct LengthBucketsSummary {
  std::int64_t batches = 0;
  std::int64_t shapes = 0;  ///< different sizes of `data` and of token targets
  double padding = 0;       ///< fraction of padding in `data`, in [0, 1]
};
std::ostream& operator<<(std::ostream& out, const LengthBucketsSummary& summary);

/// Forms batches of sequences of similar lengths, so that there is little padding.
///
///     std::vector<at::Tensor> texts{torch::randint(9, {7}), torch::randint(9, {30}), torch::randint(9, {8})};
///     ga::data::LengthBuckets buckets(texts, torch::tensor({0, 1, 0}), {.tokens = 32, .shuffle = true, .seed = 0});
///     for (auto& batch : buckets) {                                      // [2, 8] and [1, 30], or the other way round
///       auto mask = torch::arange(batch.data.size(1)) < batch.lengths.unsqueeze(1);
///       std::cout << batch.data.sizes() << ", padding: " << batch.data.numel() - batch.tokens << mask << '\n';
///     }
///
/// Order. If shuffled, an epoch's random order is cut into mega-batches of 50 batches (for a short list, a quarter of
/// it, but at least 4). Each is sorted by length and cut into batches, and all batches are shuffled. Otherwise the
/// whole list is sorted, longest first, so that a batch that exceeds memory fails first; `indices` restore the order.
///
/// Ranks. With `rank` and `world_size` of a `ProcessGroup`, all ranks form the same batches and take them in turn.
///
/// `sequences` are [length, …], length >= 1, equal in dtype, device and other dimensions; they are not copied.
/// `targets` is a tensor with a row per sequence, or a list of tensors: token targets, which are padded, too. Only one
/// loop runs at a time: each `begin()` starts the next epoch, or resumes one after `load_state`.
///
/// @note Does not synchronize: a batch's indices are copied to CUDA from pinned memory. Takes 16 bytes per sequence.
/// With `pad_to_multiple_of`, all batches of a length but one have equal numbers of rows: the remainder of a mega-batch
/// begins the next one.
class LengthBuckets : public EpochLoops<SequenceBatch> {
 public:
  LengthBuckets(std::vector<at::Tensor> sequences, at::Tensor targets, LengthBucketsOptions options);
  LengthBuckets(std::vector<at::Tensor> sequences, std::vector<at::Tensor> targets, LengthBucketsOptions options);

  std::int64_t rows() const { return sequences_.size(); }
  /// Counts the batches of `size()`, their shapes, including token targets', and padding.
  LengthBucketsSummary summary() const;

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
  mutable std::optional<std::int64_t> cut_epoch_;  // the epoch of `batches_`
  mutable std::vector<Rows> batches_;
  mutable std::map<std::int64_t, std::int64_t> sizes_;  // by epoch; schedules read all of them in each epoch
};

}  // namespace gradaccum::data

#undef GRADACCUM_INLINE

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/data/data.ipp>
#endif
