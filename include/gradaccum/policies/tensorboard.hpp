// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policy.hpp>
#include <gradaccum/summary_writer.hpp>

#include <chrono>
#include <filesystem>

namespace gradaccum {

/// Policy: the training's curves for TensorBoard: `tensorboard --logdir runs`.
///
///     ga::Trainer trainer(model, sgd, objective, ga::TensorBoard{.directory = "runs/a", .histograms_every = 2,
///                                                                .hyperparameters = "learning rate 0.001"});
///     trainer.fit(batches);
///     const double loss = trainer.evaluate(batches)["loss"];
///     trainer.policy<ga::TensorBoard>().writer()->add_scalar("test/loss", loss, trainer.updates());
///
/// Over the updates: `train/loss`, `train/lr`, `train/grad_norm` (where somebody clips by it),
/// `train/samples_per_second` (without validations), `memory/resident` and, on a device, `memory/occupied`, in bytes,
/// twice a second at most; whatever a validation found, as `validation/loss`; on request the distributions
/// `parameters/<name>`, after the update, and `gradients/<name>`, the true ones, as they are where this policy stands
/// among those with before_step. Windows that were skipped have no point; NaN has one.
///
/// A training that goes on from a state has one curve, without gaps or doubles, in a directory of its own:
/// `SummaryWriter` says how it is written. Of several processes rank 0 writes. Nothing is written in a `.smoke` fit.
/// Gradients are only looked at: parameters are those without this policy, to the bit.
///
/// @note Reads loss and norm from the device for each point; for histograms all parameters and gradients.
struct TensorBoard {
  static constexpr std::string_view name = "tensor_board";
  static constexpr bool looks_on = true;  ///< but for histograms: may go with OptimizerInBackward

  std::filesystem::path directory = {};  ///< made where it is not there; of one run
  std::int64_t every = 1;                ///< updates a point, >= 1
  std::int64_t histograms_every = 0;     ///< updates a histogram; 0: none
  std::string hyperparameters = {};      ///< a text, in Markdown
  std::chrono::duration<double> flush_every = std::chrono::seconds(10);
  struct Run;
  std::shared_ptr<Run> run = {};  ///< not an option: the state of the policy

  void attach(TrainerBase& trainer);
  std::shared_ptr<void> fit_scope();
  void before_step(Gradients& window);
  void after_step(const Step& step);
  void on_validation(const Validation& validation);
  void at_boundary();
  /// Saves nothing of its own: so what was written is on the disk before the state is.
  void state(Archive& archive);

  /// For numbers of one's own, of the same steps. Null in a process that does not write, and in a `.smoke` fit.
  SummaryWriter* writer();
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/tensorboard.ipp>
#endif
