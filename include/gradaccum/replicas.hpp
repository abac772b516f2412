// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/replica_communicator.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum {

/// The replicas of one model in the processes of a group, which train as one.
///
///     const auto group = ga::ProcessGroup::from_environment();   // torchrun's; else one process
///     ga::GradAccumulator accumulator(sgd, {.steps = 2});
///     ga::Replicas replicas(group, model, accumulator);          // rank 0's parameters and buffers
///     for (auto& batch : batches) {                              // this rank's own
///       accumulator.backward(ga::Loss{torch::mse_loss(model->forward(batch.data), batch.target), 16});
///       accumulator.step();
///       accumulator.zero_grad();
///     }
///     accumulator.flush();
///     while (replicas.others_continue()) accumulator.step();     // a rank with less data goes along
///
/// Each window of the accumulator then takes the mean over the items of all ranks, however many each has. Gradients are
/// summed once per window, in buckets that are sent while its last backward still runs (if that is an
/// `accumulator.backward`). All ranks step alike, or skip alike after an overflow on one, and stay bitwise equal as long
/// as the Replicas exist. A parameter without a gradient here gets that of the others. Sparse gradients become dense.
///
/// With `{.shard = ga::Shard::optimizer}` each rank keeps the optimizer's state of its own part of the parameters alone:
/// AdamW in float32 takes 8 + 8 / ranks bytes per parameter, gradients included, instead of 16. With
/// `ga::Shard::gradients` it takes 4 + 12 / ranks: each `accumulator.backward` sends its gradients, and waits until all
/// ranks have started theirs. A complete window has this rank's pieces of the gradients, but the norm of all. The
/// optimizer must be a `torch::optim::Optimizer` that has not stepped yet; its parameters must not be replaced or
/// moved. Without the Replicas training must continue from a saved state, as a rank has its part of the state alone.
///
/// Buffers differ between ranks during training, as BatchNorm normalises by the rank's own micro-batch;
/// `broadcast_buffers()` copies rank 0's to all, before an evaluation say.
///
/// The last loop must clip, or scale the loss, if the first does. For a single process nothing changes. Replicas work
/// neither with `in_backward` nor with a model whose parameters are not the same on all ranks. If several accumulators
/// share a group, each must close its window before another fills its own. An exception in a backward that has sent
/// gradients ends the training on all ranks, with an error that names this one.
///
/// @note A window waits for all ranks. Gradients smaller than a bucket are copied together, in as much memory again.
class Replicas {
 public:
  /// Connects a model. `optimizer` is an accumulator, or a Trainer for the policy `DataParallel`.
  template <class Model, class Optimizer>
  Replicas(ProcessGroup group, Model& model, Optimizer& optimizer, ReplicasOptions options = {})
      : group_(std::move(group)), model_(&detail::module_of(model)), communicator_(communicator_of(group_, options)) {
    if (!communicator_) return;
    optimizer.set_peers(communicator_);
    others_continue_ = [&optimizer] { return optimizer.others_continue(); };
    if constexpr (requires { optimizer.parameters(); })
      begin(options, optimizer.parameters());
    else
      begin(options, detail::parameters_of(optimizer.optimizer()));
  }
  Replicas& operator=(Replicas&&) = delete;
  ~Replicas();

  /// True if other ranks have batches left when this one has none. The next `step()` then closes a window with theirs.
  bool others_continue() { return others_continue_ && others_continue_(); }

  /// Copies the buffers of rank 0 to all ranks.
  void broadcast_buffers() const;

  /// Throws on all ranks if parameters, or a sharded optimizer's settings, differ, and names the first that does.
  ///
  /// @note Reads all parameters.
  void check_equal() const;

  const ProcessGroup& group() const { return group_; }
  /// The exchange with the other ranks, for the `peers()` of a training that is saved; nullptr for a single process.
  auto peers() const { return communicator_; }

 private:
  static std::shared_ptr<detail::ReplicaCommunicator> communicator_of(const ProcessGroup& group,
                                                                      const ReplicasOptions& options);
  void begin(const ReplicasOptions& options, const std::vector<at::Tensor>& of_optimizer) const;
  void broadcast(const std::vector<at::Tensor>& tensors) const;

  ProcessGroup group_;
  torch::nn::Module* model_;
  std::shared_ptr<detail::ReplicaCommunicator> communicator_;
  std::function<bool()> others_continue_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/parallel/replicas.ipp>
#endif
