// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/run_page.hpp>

#include <filesystem>

namespace gradaccum {

/// Policy: a page of the training for people to look at while it runs, in one HTML file.
///
///     ga::Trainer trainer(model, sgd, objective, ga::Report{.path = "run.html", .title = "A small network",
///                                                           .settings = {{"data", "random numbers"}}});
///     trainer.fit(batches);
///
/// Curves over the updates: `train/loss`, `train/lr`, `train/grad_norm` (where somebody clips by it),
/// `train/samples_per_second` (without validations), memory by kind, and whatever a validation found, as
/// `validation/loss`. With them how far it is, the time that is left, the FitReport so far, and the settings: yours,
/// and what the trainer tells of itself. `RunPage` says how it is written, and is the part for a loop of one's own.
///
/// A training that goes on from a state has one curve, without gaps or doubles. Of several processes rank 0 writes.
/// Nothing is written in a `.smoke` fit. A missing folder is made. Where the page cannot be written when the trainer is
/// built, that is an error; later on it is a warning, once and at the end, and is tried again.
///
/// @note Reads loss and norm from the device for each update. Takes microseconds an update, milliseconds a page.
struct Report {
  static constexpr std::string_view name = "report";
  using Texts = std::vector<std::pair<std::string, std::string>>;

  std::filesystem::path path = {};                                 ///< the HTML file
  std::string title = "Training";                                  ///< its heading
  Texts settings = {};                                             ///< what a reader should know of the run, by name
  std::chrono::duration<double> every = std::chrono::seconds(10);  ///< from one writing to the next, >= 0
  struct Run;
  std::shared_ptr<Run> run = {};  ///< not an option: the page and its numbers, on rank 0

  void attach(TrainerBase& trainer);
  std::shared_ptr<void> fit_scope();
  void before_close();
  void after_step(const Step& step);
  void on_validation(const Validation& validation);
  void at_boundary();
  void state(Archive& archive);

  /// The curves of this training, for a page of several.
  const Curves& curves() const;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/report.ipp>
#endif
