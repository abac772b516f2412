// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/run_page.hpp>
#include <gradaccum/trainer_base.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gradaccum {

/// Policy: a page of the training for people to look at while it runs, in one HTML file.
///
///     ga::Trainer trainer(model, sgd, [](auto& net, auto& batch) {
///       return torch::mse_loss(net->forward(batch.data), batch.target);
///     }, ga::Report{.path = "run.html", .title = "A small network", .settings = {{"data", "random numbers"}}});
///     trainer.fit(batches);
///
/// Curves over the updates: `train/loss`, `train/lr`, `train/grad_norm` (where somebody clips by it),
/// `train/samples_per_second` (of training, without validations), memory by kind, and whatever a validation found, as
/// `validation/loss`, on the chart of `train/loss`. With them how far the training is, the time that is left, key
/// figures, the numbers of the FitReport so far, and the settings: yours, and what the trainer tells of itself.
/// `RunPage` says how it looks and how it is written, and is the part for a loop of one's own.
///
/// A training that goes on from a state has one curve, without gaps or doubles; one whose state was saved without a
/// Report begins its curves there. Of several processes rank 0 writes. Nothing is written in a `.smoke` fit. Where the
/// page cannot be written when the trainer is built, that is an error; later on it is tried again, and no reason to end
/// a training.
///
/// @note Reads loss and norm from the device for each update. Time: a few microseconds an update, and some milliseconds
/// whenever the page is written.
struct Report {
  static constexpr std::string_view name = "report";
  using Texts = std::vector<std::pair<std::string, std::string>>;
  using Bytes = std::vector<std::pair<std::string, std::int64_t>>;
  using Clock = FitStatus::Clock;

  std::filesystem::path path = {};                                 ///< the HTML file
  std::string title = "Training";                                  ///< its heading
  Texts settings = {};                                             ///< what a reader should know of the run, by name
  std::chrono::duration<double> every = std::chrono::seconds(10);  ///< from one writing to the next, >= 0
  std::shared_ptr<RunPage> page = nullptr;                         ///< not an option, like all below; null: not rank 0
  TrainerBase* trainer = nullptr;
  const FitStatus* status = nullptr;           // the trainer's
  std::function<Bytes()> held = {};            // what the trainer's tensors take, by kind
  std::optional<Clock::time_point> last = {};  // when speed and memory were measured
  std::int64_t samples_then = 0;
  bool is_full = false;                                 // the window that is being closed is not a tail
  std::int64_t window_batches = 0, window_samples = 0;  // of the last full window
  Bytes memory = {};  // by kind, of the window that is being closed; empty between measurements

  /// Writes the page when a fit ends, also by an exception.
  struct [[nodiscard]] Ending {
    Report* report;
    int exceptions = std::uncaught_exceptions();
    ~Ending() { report->end(std::uncaught_exceptions() > exceptions); }
  };

  template <class Trainer>
  void attach(Trainer& to) {
    attach_to(to);
    set("model", detail::type_name(to.module()));
    if constexpr (requires { to.optimizer(); }) set("optimizer", detail::type_name(to.optimizer()));
    if constexpr (requires { to.memory_by_kind(); })
      held = [&to] {
        const auto bytes = to.memory_by_kind();
        return Bytes{{"parameters", bytes.parameters},
                     {"optimizer_state", bytes.optimizer_state},
                     {"gradients", bytes.gradients}};
      };
  }
  Ending fit_scope();
  void before_close();
  void after_step(const Step& step);
  void on_validation(const Validation& validation);
  void at_boundary();
  void state(Archive& archive);

  /// The curves of this training, for a page of several.
  const Curves& curves() const;

  void attach_to(TrainerBase& to);
  bool writes() const { return page && !status->options.smoke; }
  bool is_time_to_measure() const;
  void measure(std::int64_t update);
  void set(const std::string& setting, std::string text);
  void describe(bool is_over);
  RunEnd how_it_ended(bool by_exception) const;
  std::string why_it_ended(bool by_exception) const;
  void end(bool by_exception);
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/trainer/report.ipp>
#endif
