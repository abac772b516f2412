// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>
#include <gradaccum/detail/parallel/replica_peers.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/process_group.hpp>
#include <gradaccum/replicas_options.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum {

/// The copies of one model in the processes of a group, which train as one.
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
/// Each window of the accumulator is then the mean over the items of all ranks, whatever their numbers: gradients are
/// added up once a window, none inside of it. They are sent in buckets while the backward that fills the window still
/// runs (in the form with `accumulator.backward`). All ranks step alike, or skip alike where one has overflowed, and
/// stay equal to the bit, as long as there are Replicas. A parameter without gradients here gets those of the others.
/// Sparse gradients become dense.
///
/// With `{.shard = ga::Shard::optimizer}` each rank keeps the optimizer's state of its own part of the parameters
/// alone: AdamW in float32 takes 8 + 8 / ranks bytes a parameter, gradients included, in place of 16. With
/// `ga::Shard::gradients` it is 4 + 12 / ranks: each `accumulator.backward` sends its gradients, and waits until all
/// ranks have begun theirs. A window that is complete has this rank's pieces of the gradients, and the norm of all. The
/// optimizer is a `torch::optim::Optimizer` that has not stepped yet, its parameters stay what and where they are, and
/// afterwards it has this rank's part: a training goes on from a saved state.
///
/// Buffers are each rank's own while it trains: BatchNorm normalises by the rank's own micro-batch, as it does in a
/// window. `broadcast_buffers()` gives all those of rank 0, before an evaluation say.
///
/// A training that clips, or scales its loss, says so in the last loop as well. One process alone: nothing happens. It
/// goes neither with `in_backward` nor with a model whose parameters are not the same on all ranks.
///
/// An exception in a backward that has sent gradients is the end for all ranks, with an error that names this one. Of
/// several accumulators with one group, each closes its window before another fills its own.
///
/// @note A window waits for all ranks. Gradients smaller than a bucket are copied together: that much more memory.
class Replicas {
 public:
  /// `optimizer`: an accumulator; or a Trainer, for the policy `DataParallel`.
  template <detail::model Model, class Optimizer>
  Replicas(ProcessGroup group, Model& model, Optimizer& optimizer, ReplicasOptions options = {})
      : group_(std::move(group)), model_(&detail::module_of(model)), peers_(peers_of(group_, options)) {
    if (!peers_) return;
    optimizer.set_peers(peers_);
    others_continue_ = [&optimizer] { return optimizer.others_continue(); };
    if constexpr (requires { optimizer.parameters(); })
      begin(options, optimizer.parameters());
    else
      begin(options, detail::parameters_of(optimizer.optimizer()));
  }
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;
  ~Replicas();

  /// This rank has no more batches: true if others have. The next `step()` then closes a window with theirs.
  bool others_continue() { return others_continue_ && others_continue_(); }

  /// All ranks get the buffers of rank 0.
  void broadcast_buffers() const;

  /// Throws, on all ranks, where the parameters are not the same on all of them, and names the first that differs.
  ///
  /// @note Reads all parameters.
  void check_equal() const;

  const ProcessGroup& group() const { return group_; }
  /// For the policy `DataParallel`; none where the process is alone.
  const std::shared_ptr<detail::ReplicaPeers>& peers() const { return peers_; }

 private:
  static std::shared_ptr<detail::ReplicaPeers> peers_of(const ProcessGroup& group, const ReplicasOptions& options);
  void begin(const ReplicasOptions& options, const std::vector<at::Tensor>& of_optimizer) const;
  void broadcast(const std::vector<at::Tensor>& tensors) const;

  ProcessGroup group_;
  torch::nn::Module* model_;
  std::shared_ptr<detail::ReplicaPeers> peers_;
  std::function<bool()> others_continue_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/replicas.ipp>
#endif
