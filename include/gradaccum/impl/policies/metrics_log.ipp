// SPDX-License-Identifier: Apache-2.0
// Writes a line for each window and each validation.
#pragma once

#include <gradaccum/policies/metrics_log.hpp>

#include <gradaccum/detail/training/any_policy.hpp>
#include <gradaccum/summary_writer.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>

#include <limits>
#include <map>
#include <set>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

struct MetricsLogRun {
  std::string name;  // identifies the log in a state
  const MetricsLog& options;
  const FitProgress& progress;                                                // the trainer's
  std::shared_ptr<MetricsFile> file = {};                                     // null: this rank does not write
  std::set<std::string> validated = {};                                       // the names of all Validates
  std::map<std::string, std::shared_ptr<MetricsFile>> validation_files = {};  // by name; only for CSV
  std::int64_t windows = 0;
  bool resumes = false;  // lines after the resumed state must be removed

  std::filesystem::path path_of(const std::string& validation) const {
    if (options.path.extension() != ".csv") return options.path;
    auto beside = options.path;
    return beside.replace_extension('.' + validation + ".csv");
  }

  MetricsFile& file_of(const std::string& validation) {
    if (options.path.extension() != ".csv") return *file;
    auto& beside = validation_files[validation];
    if (!beside)
      beside = std::make_shared<MetricsFile>(MetricsFileOptions{.path = path_of(validation), .append = options.append});
    return *beside;
  }

  /// Removes lines that the resumed run wrote after its state. A validation before the first window is repeated, so
  /// that a line of it with the same `samples` is removed, too.
  void resume_from(std::int64_t samples, bool validates) {
    if (!std::exchange(resumes, false) || progress.options.resume.empty() || !file) return;
    const auto last = static_cast<double>(samples);
    const auto last_validated = validates ? last - 0.5 : last;
    file->remove_lines_at_end("samples", last);
    file->remove_lines_at_end("samples", last_validated, "moved");
    for (auto& validation : validated)
      if (path_of(validation) != options.path && std::filesystem::exists(path_of(validation)))
        file_of(validation).remove_lines_at_end("samples", last_validated);
  }

  std::shared_ptr<void> fit_scope() {
    resumes = options.append;
    return flush_at_end(file);
  }

  void after_window(const Step& step) {
    resume_from(progress.samples - step.samples, /*validates=*/false);
    if (++windows % options.every != 0 || !file) return;
    const auto norm =
        step.grad_norm.defined() ? step.grad_norm.item<double>() : std::numeric_limits<double>::quiet_NaN();
    file->write({{"update", step.update},
                 {"epoch", step.epoch},
                 {"samples", progress.samples},
                 {"items", step.items},
                 {"micro_batches", step.micro_batches},
                 {"moved", step.moved},
                 {"loss", step.loss.item<double>()},
                 {"grad_norm", norm},
                 {"lr", step.lr},
                 {"seconds", progress.seconds()}});
  }

  void on_validation(const Validation& validation) {
    if (!file) return;
    resume_from(validation.samples, /*validates=*/true);
    MetricsFile::Fields fields{{"update", validation.update},
                               {"epoch", validation.epoch},
                               {"samples", validation.samples},
                               {"seconds", validation.seconds}};
    for (auto& [metric, number] : validation.found.metrics) fields.emplace_back(validation.name + '/' + metric, number);
    file_of(validation.name).write(fields);
  }

  void at_boundary() const {
    if (file && progress.done()) file->flush();
  }

  /// Saves nothing, but flushes the file, so that it has all lines of the saved updates.
  void state(Archive& archive) const {
    if (file && !archive.loading()) file->flush();
  }
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> MetricsLog::start(TrainerBase& trainer) {
  TORCH_CHECK(every >= 1, "MetricsLog: every must be >= 1, got ", every);
  const auto seconds = flush_every.count();
  TORCH_CHECK(seconds >= 0, "MetricsLog: flush_every must be >= 0 seconds, got ", seconds);
  const auto run = detail::started<detail::MetricsLogRun>("log of " + path.string(), *this, trainer.progress());
  for (auto& [metric, mode] : trainer.metrics()) run->policy.validated.insert(metric.substr(0, metric.find('/')));
  if (trainer.is_first())
    run->policy.file =
        std::make_shared<MetricsFile>(MetricsFileOptions{.path = path, .append = append, .flush_every = flush_every});
  return run;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
