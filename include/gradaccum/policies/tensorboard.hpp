// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/policy.hpp>
#include <gradaccum/summary_writer.hpp>

#include <chrono>
#include <filesystem>

namespace gradaccum {

namespace detail {
struct TensorBoardRun;
}

/// Policy: writes the training's curves for TensorBoard, which shows them by `tensorboard --logdir runs`.
///
///     ga::Trainer trainer(model, sgd, objective, ga::TensorBoard{.directory = "runs/a", .histograms_every = 2,
///                                                                .hyperparameters = "learning rate 0.001"});
///     trainer.fit(batches);
///     const double loss = trainer.evaluate(batches)["loss"];
///     trainer.policy<ga::TensorBoard>().writer()->add_scalar("test/loss", loss, trainer.updates());
///
/// The curves are `train/loss`, `train/lr`, `train/grad_norm` (if a policy measures it), `train/samples_per_second`
/// (without the time of validations), `memory/resident` and, on a device, `memory/occupied`, in bytes, at most twice
/// per second, and all metrics of a `Validate`, such as `validation/loss`. Skipped windows have no point; NaN has one.
///
/// Histograms. With `histograms_every` it writes `parameters/<name>` after the update, and `gradients/<name>` without a
/// loss scale, and clipped if this policy is listed after a clipping one. The training is bitwise unaffected.
///
/// Resuming. A resumed training continues its curves without gaps or duplicates; each run needs its own directory. Only
/// rank 0 writes, and nothing is written in a `.smoke` fit. See `SummaryWriter`.
///
/// @note Reads loss and norm from the device for each point; for histograms all parameters and gradients.
struct TensorBoard {
  static constexpr std::string_view name = "tensor_board";

  std::filesystem::path directory = {};  ///< created if it does not exist; for one run only
  std::int64_t every = 1;                ///< updates per point, >= 1
  std::int64_t histograms_every = 0;     ///< updates per histogram; 0: none
  std::string hyperparameters = {};      ///< a text in Markdown
  std::chrono::duration<double> flush_every = std::chrono::seconds(10);

  class Running;
};

/// A TensorBoard in a Trainer: what `trainer.policy<ga::TensorBoard>()` returns.
class TensorBoard::Running : public TensorBoard {
 public:
  using Options = TensorBoard;
  explicit Running(TensorBoard given) : TensorBoard(std::move(given)) {}
  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);

  /// Returns the writer, for numbers of your own with the same steps. Null on ranks that do not write, and in a
  /// `.smoke` fit.
  SummaryWriter* writer();

 private:
  std::shared_ptr<detail::TensorBoardRun> run_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/tensorboard.ipp>
#endif
