// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/report.hpp>

#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/progress_line.hpp>

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <iterator>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// `1 sample`, `64 samples`
GRADACCUM_INLINE std::string count_text(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// `20 epochs, or 1:00:00`
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

GRADACCUM_INLINE void add_numbers(RunPage& page, const FitReport& report) {
  page.number("epochs", report.epochs);
  page.number("updates", report.updates);
  page.number("skipped", report.skipped);
  page.number("samples", report.samples);
  page.number("seconds", report.seconds, duration_text(report.seconds));
  page.number("samples per second", report.samples_per_second, rate_text(report.samples_per_second));
  page.number("validations", std::ssize(report.validations));
  if (report.nan_batches > 0) page.number("left out for a loss of NaN or infinity", report.nan_batches);
}

}  // namespace detail

/// Makes the page without writing it: the file may be that of the run that this one goes on from.
GRADACCUM_INLINE void Report::attach_to(TrainerBase& to) {
  TORCH_CHECK(!path.empty(), "Report: path must be given");
  TORCH_CHECK(every.count() >= 0, "Report: every must be >= 0 s, got ", every.count(), " s");
  trainer = &to;
  status = &to.status();
  if (!to.is_first()) return;
  page = std::make_shared<RunPage>(RunPageOptions{.path = path, .title = title, .every = every});
  for (auto& [setting, text] : settings) page->set(setting, text);
}

GRADACCUM_INLINE Report::Ending Report::fit_scope() {
  last.reset();
  if (page) page->restart();
  return {this};
}

/// Measures memory and speed once in a while, since short times say little of the speed.
GRADACCUM_INLINE bool Report::is_time_to_measure() const { return writes() && detail::is_time_to_ask(last); }

/// Measures memory when all gradients of a window are there and its activations are gone.
GRADACCUM_INLINE void Report::before_close() {
  is_full = trainer->closing();
  memory.clear();
  if (!is_time_to_measure()) return;
  const auto occupied = detail::occupied_memory(trainer->device());
  if (held) memory = held();
  std::int64_t known = 0;
  for (auto& [kind, bytes] : memory) known += bytes;
  if (occupied) memory.emplace_back(held ? "rest" : "resident", std::max<std::int64_t>(*occupied - known, 0));
}

GRADACCUM_INLINE void Report::after_step(const Step& step) {
  if (!writes()) return;
  page->add("train/loss", step.update, step.loss.item<double>());
  if (!std::isnan(step.lr)) page->add("train/lr", step.update, step.lr);
  if (step.grad_norm.defined()) page->add("train/grad_norm", step.update, step.grad_norm.item<double>());
  if (is_time_to_measure()) measure(step.update);
  if (!is_full) return;  // a tail says little of the others
  window_batches = step.batches;
  window_samples = step.samples;
}

/// Measures the speed since the last call; the first call of a fit only takes the time.
GRADACCUM_INLINE void Report::measure(std::int64_t update) {
  for (auto& [kind, bytes] : std::exchange(memory, {})) page->add("memory/" + kind, update, static_cast<double>(bytes));
  const auto now = Clock::now();
  const auto before = std::exchange(last, now);
  const auto samples = status->samples - std::exchange(samples_then, status->samples);
  const double seconds = before ? std::chrono::duration<double>(now - *before).count() : 0;
  if (seconds > 0 && samples > 0) page->add("train/samples_per_second", update, static_cast<double>(samples) / seconds);
}

/// Leaves the time of the validation out of the training's speed.
GRADACCUM_INLINE void Report::on_validation(const Validation& validation) {
  if (!writes()) return;
  const std::chrono::duration<double> took(validation.found.seconds);
  if (last) *last += std::chrono::duration_cast<Clock::duration>(took);
  for (auto& [metric, number] : validation.found.metrics)
    page->add(validation.name + '/' + metric, validation.update, number);
}

/// Keeps a setting of the user's that has this name.
GRADACCUM_INLINE void Report::set(const std::string& setting, std::string text) {
  const auto is_it = [&setting](auto& other) { return other.first == setting; };
  if (page && std::none_of(settings.begin(), settings.end(), is_it)) page->set(setting, std::move(text));
}

GRADACCUM_INLINE void Report::describe(bool is_over) {
  const auto report = detail::report_of(*status);
  const auto& options = status->options;
  const auto begun = status->epochs + (status->batch > 0);  // epochs, of this fit
  const auto epochs = status->epoch + 1 - begun + options.epochs.value_or(1);
  const auto* const loss = page->curves().find("train/loss");
  const auto* const rate = is_over ? nullptr : page->curves().find("train/samples_per_second");
  page->tile("updates", static_cast<double>(trainer->updates()),
             report.skipped > 0 ? fmt::format("{} skipped", report.skipped) : "");
  page->tile("epoch", static_cast<double>(status->epoch + 1),
             options.epochs || !options.has_limit() ? fmt::format("of {}", epochs) : "");
  page->tile("samples/s", rate ? rate->last().value : report.samples_per_second,
             (rate ? rate_text(report.samples_per_second) + ' ' : "") + "on average");
  if (loss) page->tile("train loss", loss->last().value, "in the last update");
  if (const auto bytes = peak_resident_memory())
    page->tile("peak memory", fmt::format("{:.0f} MB", static_cast<double>(*bytes) / MiB), "of this process");
  detail::add_numbers(*page, report);
  set("parameters", detail::parameters_text(trainer->parameters()));
  set("device", trainer->device().str());
  set("trains for", detail::limits_text(options));
  if (window_batches > 0)
    set("an update has", fmt::format("{} micro-batch{}, {}", window_batches, window_batches == 1 ? "" : "es",
                                     detail::count_text(window_samples, "sample")));
  if (!status->resumed_from.empty()) set("resumed from", status->resumed_from);
}

GRADACCUM_INLINE void Report::at_boundary() {
  if (!writes() || !page->is_due() || status->done()) return;
  describe(false);
  try {
    page->update({.fraction = status->fraction(), .seconds = status->seconds()});
  } catch (const std::exception&) {  // it is tried again, and at the end
  }
}

GRADACCUM_INLINE RunEnd Report::how_it_ended(bool by_exception) const {
  if (by_exception || status->signal != 0) return RunEnd::interrupted;
  return status->stopped ? RunEnd::stopped : RunEnd::finished;
}

GRADACCUM_INLINE std::string Report::why_it_ended(bool by_exception) const {
  if (by_exception) return "by an exception";
  if (status->signal == SIGINT) return "by SIGINT";
  if (status->signal == SIGTERM) return "by SIGTERM";
  return status->signal != 0 ? fmt::format("by signal {}", status->signal) : status->stop_reason;
}

/// Writes the page for the last time. Does not throw, since a destructor calls it.
GRADACCUM_INLINE void Report::end(bool by_exception) {
  if (!writes()) return;
  const auto how = how_it_ended(by_exception);
  try {
    if (!page->curves().find("train/samples_per_second")) measure(trainer->updates());  // it was short
    describe(true);
    const auto whole = how == RunEnd::finished ? std::optional(1.0) : std::nullopt;
    page->end(how, why_it_ended(by_exception), {.fraction = whole, .seconds = status->seconds()});
  } catch (const std::exception&) {
  }
}

/// Leaves the curves out on ranks that have none, and where the state is of a training without a Report.
GRADACCUM_INLINE void Report::state(Archive& archive) {
  if (!page) return archive.leave_out("page");
  if (archive.loading() && !archive.has("page")) return;
  archive("page", *page);
  if (archive.loading()) archive.when_all_fit([this] { last.reset(); });
}

GRADACCUM_INLINE const Curves& Report::curves() const {
  TORCH_CHECK(page, "Report: rank 0 alone has the curves");
  return page->curves();
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
