// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: policies

#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/run_page.hpp>

#include <filesystem>

namespace gradaccum {

namespace detail {
struct ReportRun;
}

/// Policy: writes an HTML page with curves and numbers of the training, also while it runs.
///
///     ga::Trainer trainer(model, sgd, objective, ga::Report{.path = "run.html", .title = "A small network",
///                                                           .settings = {{"data", "random numbers"}}});
///     trainer.fit(batches);
///
/// The curves are `train/loss`, `train/lr`, `train/grad_norm` (if a policy measures it), `train/samples_per_second`
/// (without the time of validations), `train/tokens_per_second` by `FitOptions::unit`, `train/mfu` in percent with a
/// peak, memory by kind, and all metrics of a `Validate`, such as `validation/loss`. The page also has the progress, the
/// remaining time, the FitReport so far, and settings: yours and the trainer's. For a loop of your own use `RunPage`.
///
/// Resuming. A resumed training continues its curves without gaps or duplicates.
///
/// Writing. Only rank 0 writes, and nothing is written in a `.smoke` fit. A missing folder is created. Throws if the
/// page cannot be written when the trainer is constructed; later failures are warnings, and writing is tried again.
///
/// @note Reads loss and norm from the device for each update. Takes microseconds per update, milliseconds per page.
struct Report {
  static constexpr std::string_view name = "report";
  using Texts = std::vector<std::pair<std::string, std::string>>;

  std::filesystem::path path = {};                                 ///< the HTML file
  std::string title = "Training";                                  ///< its heading
  Texts settings = {};                                             ///< texts by name that describe the run
  std::chrono::duration<double> every = std::chrono::seconds(10);  ///< time between two writes of the file, >= 0

  class Running;
};

/// A Report in a Trainer: what `trainer.policy<ga::Report>()` returns.
class Report::Running : public Report {
 public:
  using Options = Report;
  explicit Running(Report given) : Report(std::move(given)) {}
  std::shared_ptr<PolicyRun> start(TrainerBase& trainer);

  /// Returns the curves of this training, for example to show several trainings on one page. Throws except on rank 0.
  const Curves& curves() const;

 private:
  std::shared_ptr<detail::ReportRun> run_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/policies/report.ipp>
#endif
