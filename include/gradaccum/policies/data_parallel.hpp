// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/policy.hpp>
#include <gradaccum/replicas.hpp>

namespace gradaccum {

/// Policy: trains one model on all ranks of a process group, started with
/// `torchrun --no-python --nproc-per-node 2 ./program`.
///
///     const auto group = ga::ProcessGroup::from_environment();    // torchrun's; else one process
///     ga::data::TensorBatches mine(x, y, {.batch_size = 8, .shuffle = true, .rank = group.rank(),
///                                         .world_size = group.world_size()});
///     ga::Trainer trainer(model, sgd, objective, ga::Accumulate{.steps = 2}, ga::DataParallel{.group = group});
///     trainer.fit(mine, {.epochs = 2});
///
/// Gradients. Each update uses the mean over the items of all ranks; see `Replicas`. `.shard` divides the optimizer's
/// state, or also the gradients. A rank with less data joins the updates until the end of the epoch, when rank 0's
/// buffers are broadcast. Losses, items and samples in reports are over all ranks.
///
/// Stopping. `stop()` or a signal with `SaveState` on one rank ends `fit` on all, after the next window or the epoch;
/// so does an exception.
///
/// Resuming. All ranks save to and load from a shared directory, each with its own random numbers, position in the data
/// and part of a sharded optimizer. A run resumed with as many ranks is bitwise identical.
///
/// Per rank. Each rank runs `evaluate` on its own, skips batches by `OnNan::skip`, and averages its buffers in `Ema`.
///
/// @note Waits for all ranks when a window closes, and then reads the loss from the device.
struct DataParallel {
  static constexpr std::string_view name = "data_parallel";

  ProcessGroup group = ProcessGroup::from_environment();
  Shard shard = Shard::none;        ///< the part of the training that is divided among the ranks
  ReplicasOptions options = {};     ///< options of the gradients' exchange
  std::int64_t check_every = 1000;  ///< updates between checks that all replicas are equal; 0: never

  class Running;
};

/// A DataParallel in a Trainer: what `trainer.policy<ga::DataParallel>()` returns.
class DataParallel::Running : public DataParallel {
 public:
  using Options = DataParallel;
  explicit Running(DataParallel given) : DataParallel(std::move(given)) {}

  Replicas& replicas() const;  ///< the connected model, for example to broadcast its buffers

  void attach(TrainerBase& trainer);
  bool others_continue() const;
  void after_step(const Step& step) const;
  void on_epoch_end(std::int64_t) const;
  /// Requires the same number of ranks in a resumed training.
  void state(Archive& archive) const;

 private:
  std::shared_ptr<Replicas> replicas_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/data_parallel.ipp>
#endif
