// SPDX-License-Identifier: Apache-2.0
// Writes the page of a Trainer's run while it trains.
#pragma once

#include <gradaccum/policies/report.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <iterator>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// Returns `1 sample`, or `64 samples`.
GRADACCUM_INLINE std::string count_text(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// Returns the limits of a fit, such as `20 epochs, or 1:00:00`.
GRADACCUM_INLINE std::string limits_text(const FitOptions& options) {
  std::string text;
  const auto add = [&text](const std::string& limit) { text += (text.empty() ? "" : ", or ") + limit; };
  if (options.epochs || !options.has_limit()) add(count_text(options.epochs.value_or(1), "epoch"));
  if (options.updates) add(count_text(*options.updates, "update"));
  if (options.samples) add(count_text(*options.samples, "sample"));
  if (options.time) add(duration_text(options.time->count()));
  return text;
}

GRADACCUM_INLINE std::string parameters_text(const std::vector<at::Tensor>& parameters) {
  std::int64_t count = 0;
  std::size_t bytes = 0;
  for (auto& parameter : parameters) {
    count += parameter.numel();
    bytes += parameter.nbytes();
  }
  return fmt::format("{}, {:.1f} MB", count, static_cast<double>(bytes) / MiB);
}

struct ReportRun {
  static constexpr std::string_view name = Report::name;
  using Clock = std::chrono::steady_clock;

  const Report& options;
  TrainerBase& trainer;
  const FitProgress& progress = trainer.progress();
  RunPage page{RunPageOptions{.path = options.path, .title = options.title, .every = options.every}};
  std::optional<Clock::time_point> last = {};  // when speed and memory were measured
  std::int64_t samples_then = 0;
  double items_then = 0, flops_then = 0;
  bool is_full = false;                                           // the closing window is not a tail
  std::int64_t window_batches = 0, window_samples = 0;            // of the last full window
  std::vector<std::pair<std::string, std::int64_t>> memory = {};  // by kind; empty between measurements
  bool has_warned = false;

  bool writes() const { return !progress.options.smoke; }
  /// True if it is time to measure memory and speed, since short intervals give noisy speeds.
  bool is_time_to_measure() const { return writes() && is_time_to_ask(last); }

  /// Adds the measured memory and the speed since the last call. The first call of a fit has no speed yet.
  void measure(std::int64_t update) {
    for (auto& [kind, bytes] : std::exchange(memory, {}))
      page.add("memory/" + kind, update, static_cast<double>(bytes));
    const auto now = Clock::now();
    const auto before = std::exchange(last, now);
    const auto samples = progress.samples - std::exchange(samples_then, progress.samples);
    const auto items = progress.items() - std::exchange(items_then, progress.items());
    const auto flops = progress.flops() - std::exchange(flops_then, progress.flops());
    const double seconds = before ? std::chrono::duration<double>(now - *before).count() : 0;
    const auto add = [&](const std::string& what, double number) {
      if (seconds > 0 && number > 0) page.add("train/" + what, update, number / seconds);
    };
    add("samples_per_second", static_cast<double>(samples));
    if (const auto& unit = progress.options.unit; !unit.empty()) add(unit + "_per_second", items);
    if (progress.peak_flops() > 0) add("mfu", 100 * flops / progress.peak_flops());
  }

  /// Sets a value on the page, unless the user's settings have this name.
  void set(const std::string& setting, std::string text) {
    const auto is_it = [&setting](auto& other) { return other.first == setting; };
    if (std::none_of(options.settings.begin(), options.settings.end(), is_it)) page.set(setting, std::move(text));
  }

  void describe(bool is_over) {
    for (auto& [setting, text] : options.settings) page.set(setting, text);
    set("model", type_name(trainer.module()));
    set("optimizer", trainer.optimizer_name());
    const auto report = trainer.report();
    const auto& fit = progress.options;
    const auto begun = progress.epochs + (progress.batch > 0);  // epochs begun in this fit
    const auto epochs = progress.epoch + 1 - begun + fit.epochs.value_or(1);
    const auto* const loss = page.curves().find("train/loss");
    const auto* const rate = is_over ? nullptr : page.curves().find("train/samples_per_second");
    page.tile("updates", static_cast<double>(trainer.updates()),
              report.skipped > 0 ? fmt::format("{} skipped", report.skipped) : "");
    page.tile("epoch", static_cast<double>(progress.epoch + 1),
              fit.epochs || !fit.has_limit() ? fmt::format("of {}", epochs) : "");
    page.tile("samples/s", rate ? rate->last().value : report.samples_per_second,
              (rate ? rate_text(report.samples_per_second) + ' ' : "") + "on average");
    if (!report.unit.empty()) page.tile(report.unit + "/s", report.items / report.seconds, "on average");
    if (report.flops > 0 && report.peak_flops > 0)
      page.tile("MFU", fmt::format("{:.1f} %", 100 * report.flops_per_second / report.peak_flops),
                "on average, of " + flops_text(report.peak_flops));
    if (report.flops > 0) set("FLOP/s", flops_text(report.flops_per_second, report.peak_flops));
    if (loss) page.tile("train loss", loss->last().value, "in the last update");
    if (const auto bytes = peak_resident_memory())
      page.tile("peak memory", fmt::format("{:.0f} MB", static_cast<double>(*bytes) / MiB), "of this process");
    page.number("epochs", report.epochs);
    page.number("updates", report.updates);
    page.number("skipped", report.skipped);
    page.number("samples", report.samples);
    page.number("seconds", report.seconds, duration_text(report.seconds));
    page.number("samples per second", report.samples_per_second, rate_text(report.samples_per_second));
    page.number("validations", std::ssize(report.validations));
    if (report.nan_batches > 0) page.number("left out for a loss or gradient of NaN or infinity", report.nan_batches);
    if (report.rejected > 0) {
      page.number("rejected", report.rejected);
      set("first rejected window", report.first_rejected);
    }
    set("parameters", parameters_text(trainer.parameters()));
    set("device", trainer.device().str());
    set("trains for", limits_text(fit));
    if (window_batches > 0)
      set("an update has", fmt::format("{} micro-batch{}, {}", window_batches, window_batches == 1 ? "" : "es",
                                       count_text(window_samples, "sample")));
    if (!progress.resumed_from.empty()) set("resumed from", progress.resumed_from);
  }

  /// Writes the page for the last time. Does not throw, since a destructor calls it.
  void end(bool by_exception) try {
    if (!writes()) return;
    if (!page.curves().find("train/samples_per_second")) measure(trainer.updates());  // the run was too short
    describe(true);
    auto how = progress.stopped ? RunEnd::stopped : RunEnd::finished;
    auto why = trainer.report().stopped;
    if (by_exception || progress.signal() != 0) {
      how = RunEnd::interrupted;
      why = by_exception                   ? "by an exception"
            : progress.signal() == SIGINT  ? "by SIGINT"
            : progress.signal() == SIGTERM ? "by SIGTERM"
                                           : fmt::format("by signal {}", progress.signal());
    }
    const auto whole = how == RunEnd::finished ? std::optional(1.0) : std::nullopt;
    page.end(how, why, {.fraction = whole, .seconds = progress.seconds()});
  } catch (const std::exception& error) {
    warn(error);
  }

  static void warn(const std::exception& error) { TORCH_WARN("Report: the page was not written: ", error.what()); }

  /// Writes the page when a fit ends, also by an exception.
  std::shared_ptr<void> fit_scope() {
    last.reset();
    page.restart();
    const int exceptions = std::uncaught_exceptions();
    return {nullptr, [this, exceptions](void*) { end(std::uncaught_exceptions() > exceptions); }};
  }

  /// Measures memory when a window has all its gradients and its activations have been freed.
  void before_close() {
    is_full = trainer.closing();
    memory.clear();
    if (!is_time_to_measure()) return;
    const auto occupied = occupied_memory(trainer.device());
    auto bytes = trainer.memory_by_kind();
    if (!trainer.device().is_cpu()) bytes.state_copy = 0;  // host memory
    memory = {
        {"parameters", bytes.parameters}, {"optimizer_state", bytes.optimizer_state}, {"gradients", bytes.gradients}};
    if (bytes.state_copy > 0) memory.emplace_back("state_copy", bytes.state_copy);
    if (occupied) memory.emplace_back("rest", std::max<std::int64_t>(*occupied - bytes.total(), 0));
  }

  void after_step(const Step& step) {
    if (!writes()) return;
    page.add("train/loss", step.update, step.loss.item<double>());
    if (!is_nan(step.lr)) page.add("train/lr", step.update, step.lr);
    if (step.grad_norm.defined()) page.add("train/grad_norm", step.update, step.grad_norm.item<double>());
    if (is_time_to_measure()) measure(step.update);
    if (!is_full) return;  // the size of a tail is not typical
    window_batches = step.batches;
    window_samples = step.samples;
  }

  /// Adds the metrics, and excludes the time of the validation from the training speed.
  void on_validation(const Validation& validation) {
    if (!writes()) return;
    const std::chrono::duration<double> took(validation.found.seconds);
    if (last) *last += std::chrono::duration_cast<Clock::duration>(took);
    for (auto& [metric, number] : validation.found.metrics)
      page.add(validation.name + '/' + metric, validation.update, number);
  }

  void at_boundary() {
    if (!writes() || !page.is_due() || progress.done()) return;
    describe(false);
    try {
      page.update({.fraction = progress.fraction(), .seconds = progress.seconds()});
    } catch (const std::exception& error) {  // a later boundary and the end try again
      if (!std::exchange(has_warned, true)) warn(error);
    }
  }

  /// Loads no curves from a state that was saved without a Report.
  void state(Archive& archive) {
    if (archive.loading() && !archive.has("page")) return;
    archive("page", page);
    if (archive.loading()) archive.when_all_fit([this] { last.reset(); });
  }
};

/// The run on ranks that have no page.
struct ReportElsewhere {
  static constexpr std::string_view name = Report::name;
  void state(Archive& archive) const { archive.leave_out("page"); }
};

}  // namespace detail

/// Creates the page without writing it, because the file may belong to the run that this one resumes.
GRADACCUM_INLINE std::shared_ptr<PolicyRun> Report::Running::start(TrainerBase& trainer) {
  TORCH_CHECK(!path.empty(), "Report: path must be given");
  TORCH_CHECK(every.count() >= 0, "Report: every must be >= 0 s, got ", every.count(), " s");
  if (!trainer.is_first()) return detail::started<detail::ReportElsewhere>();
  return detail::started_and_kept<detail::ReportRun>(run_, *this, trainer);
}

GRADACCUM_INLINE const Curves& Report::Running::curves() const {
  TORCH_CHECK(run_, "Report: only rank 0 has the curves, once the trainer is built");
  return run_->page.curves();
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
