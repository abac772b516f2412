// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>
#include <gradaccum/replicas.hpp>

namespace gradaccum {

/// Policy: the processes of a group train one model together, as torchrun starts them:
/// `torchrun --no-python --nproc-per-node 2 ./program`.
///
///     const auto group = ga::ProcessGroup::from_environment();    // torchrun's; else one process
///     ga::data::TensorBatches mine(x, y, {.batch_size = 8, .shuffle = true, .rank = group.rank(),
///                                         .world_size = group.world_size()});
///     ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group});
///     trainer.fit(mine, {.epochs = 2});
///
/// `Replicas` is the part, whose documentation says the rest: windows are the mean over the items of all ranks, and
/// `.shard` divides the optimizer's state, or the gradients, too. Steps and reports are of all ranks, and the same on
/// each: losses, items, samples. Progress and MetricsLog are rank 0's. A rank with less data than others goes along to
/// the end of the epoch; buffers are rank 0's from there on.
///
/// What ends the training (`stop()`, a signal with SaveState) ends it on all ranks, after the window that is closed
/// next, or the epoch. An exception in `fit` on one rank ends it on all. States are saved by all, each rank
/// what is its own (random numbers, the place in its data, its part of a divided optimizer); they are loaded by all,
/// from a directory that all see, with the same number of ranks, and go on to the bit.
///
/// `evaluate` is each rank's own: given the same batches, the results are the same. So are the batches that
/// `OnNan::skip` leaves out, and the averages that `Ema` has of buffers.
///
/// @note Waits for all ranks when a window closes, and reads the losses of a device then.
struct DataParallel {
  static constexpr std::string_view name = "data_parallel";

  ProcessGroup group = ProcessGroup::from_environment();
  Shard shard = Shard::none;                     ///< the part of the training that is divided, not repeated
  ReplicasOptions options = {};                  ///< how gradients are exchanged
  std::int64_t check_every = 1000;               ///< updates between checks that all replicas are equal; 0: never
  std::shared_ptr<Replicas> replicas = nullptr;  ///< made when the trainer is built

  void attach(TrainerBase& trainer);
  bool others_continue() const;
  void after_step(const Step& step) const;
  void on_epoch_end(std::int64_t) const;
  /// A training that goes on has as many.
  void state(Archive& archive) const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/data_parallel.ipp>
#endif
