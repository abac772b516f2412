// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: parallel

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

/// Trains one model on all ranks of a process group, each with a replica.
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
/// Each window uses the mean over the items of all ranks, whose numbers may differ. All ranks step, or skip after an
/// overflow on one rank, and remain bitwise equal.
///
/// Sharding. With `{.shard = ga::Shard::optimizer}` each rank has the optimizer's state of its part of the parameters:
/// AdamW in float32 takes 8 + 8 / ranks bytes per parameter, with gradients, instead of 16; with `ga::Shard::gradients`
/// 4 + 12 / ranks. The optimizer must be a `torch::optim::Optimizer` without steps so far, and its parameters must not
/// be replaced.
///
/// Buffers. BatchNorm uses a rank's own micro-batches, so buffers differ: call `broadcast_buffers()` before an
/// evaluation.
///
/// Limits. If the loop clips or scales the loss, so must the loop over `others_continue()`. Not with `in_backward`.
///
/// @note A window waits for all ranks. Gradients are summed once per window, in buckets that are sent during its last
/// `accumulator.backward`; with `ga::Shard::gradients` in each, which waits until all ranks have started theirs.
/// Gradients smaller than a bucket are copied, which takes as much memory again. Sparse gradients become dense; a
/// parameter without a gradient on a rank gets the gradient of the other ranks. An exception in a backward pass that
/// has sent gradients ends the training on all ranks, with an error that names this one. After the Replicas a sharded
/// training can only resume from a state, since each rank has only its part of the optimizer's state. If several
/// accumulators share a group, each must close its window before another fills its own. With `ga::Shard::gradients` a
/// complete window has only this rank's pieces of the gradients, but the norm of all.
class Replicas {
 public:
  /// Connects a model and its accumulator to the other ranks, which all construct one, and copies rank 0's parameters
  /// and buffers to all. With a Trainer use the policy `DataParallel`.
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

  /// Returns true if other ranks have batches left when this one has none. The next `step()` then joins their window.
  bool others_continue() { return others_continue_ && others_continue_(); }

  /// Copies the buffers of rank 0 to all ranks.
  void broadcast_buffers() const;

  /// Throws on all ranks if parameters, or a sharded optimizer's settings, differ, and names the first difference.
  ///
  /// @note Reads all parameters.
  void check_equal() const;

  const ProcessGroup& group() const { return group_; }
  /// Returns the exchange with the other ranks, for `peers()` of a training of your own; nullptr for a single process.
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
