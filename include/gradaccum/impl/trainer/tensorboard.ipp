// SPDX-License-Identifier: Apache-2.0
// Writes a Trainer's numbers as TensorBoard event files.
#pragma once

#include <gradaccum/policies/tensorboard.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/summary_writer.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <unistd.h>
#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

/// Returns the names of parameters in the module. A parameter that it does not have is named by its index.
GRADACCUM_INLINE std::vector<std::string> names_of_parameters(const torch::nn::Module& module,
                                                              const std::vector<at::Tensor>& parameters) {
  std::unordered_map<const void*, std::string> known;
  for (auto& item : module.named_parameters()) known.emplace(item.value().unsafeGetTensorImpl(), item.key());
  std::vector<std::string> names;
  for (auto& parameter : parameters) {
    const auto found = known.find(parameter.unsafeGetTensorImpl());
    names.push_back(found != known.end() ? found->second : "parameter_" + std::to_string(names.size()));
  }
  return names;
}

}  // namespace detail

struct TensorBoard::Run {
  using Clock = FitStatus::Clock;

  const TensorBoard& options;
  TrainerBase& trainer;
  const FitStatus& status = trainer.status();
  std::shared_ptr<SummaryWriter> file = {};
  bool begins = true;                            // nothing was written since construction or loading
  std::int64_t begun_at = 0;                     // updates before the first write
  std::optional<Clock::time_point> before = {};  // when the last speed was written
  std::int64_t samples_before = 0;
  std::optional<Clock::time_point> measured = {};                              // when memory was measured
  std::vector<std::pair<std::string, detail::ValueHistogram>> gradients = {};  // of the next step

  bool writes() const { return trainer.is_first() && !status.options.smoke; }

  void open(std::optional<std::int64_t> purge_step) {
    file = std::make_shared<SummaryWriter>(SummaryWriterOptions{
        .directory = options.directory, .flush_every = options.flush_every, .purge_step = purge_step});
  }

  /// Returns the writer for numbers of the training. Opens it at the first of them, because only then is it known that
  /// there is a training, and whether it resumes a state.
  SummaryWriter* begun() {
    if (!writes()) return nullptr;
    if (!begins) return file.get();
    std::optional<std::int64_t> purge_step;
    if (begun_at > 0) purge_step = begun_at + 1;
    if (begun_at == 0 && !status.options.resume.empty()) purge_step = 0;  // a run may have died before its state
    if (purge_step || !file) open(purge_step);
    if (!options.hyperparameters.empty())
      file->add_text("hyperparameters", options.hyperparameters, purge_step.value_or(0));
    begins = false;
    return file.get();
  }

  /// Restarts the measurement of speed and memory, and drops histograms that were not written.
  void restart() {
    if (begins) begun_at = trainer.updates();
    gradients.clear();
    measured.reset();
    before = Clock::now();
    samples_before = status.samples;
  }

  void write_numbers(const Step& step) {
    file->add_scalar("train/loss", step.loss.item<double>(), step.update);
    if (!detail::is_nan(step.lr)) file->add_scalar("train/lr", step.lr, step.update);
    if (step.grad_norm.defined()) file->add_scalar("train/grad_norm", step.grad_norm.item<double>(), step.update);
    write_rate(step.update);
    write_memory(step.update);
  }

  void write_rate(std::int64_t step) {
    const auto now = Clock::now();
    const auto last = std::exchange(before, now);
    const auto samples = status.samples - std::exchange(samples_before, status.samples);
    const auto seconds = last ? std::chrono::duration<double>(now - *last).count() : 0;
    if (seconds > 0) file->add_scalar("train/samples_per_second", static_cast<double>(samples) / seconds, step);
  }

  void write_memory(std::int64_t step) {
    if (!detail::is_time_to_ask(measured)) return;
    measured = Clock::now();
    const auto device = trainer.device();
    if (const auto bytes = detail::occupied_memory(at::kCPU))
      file->add_scalar("memory/resident", static_cast<double>(*bytes), step);
    if (device.is_cpu()) return;
    if (const auto bytes = detail::occupied_memory(device))
      file->add_scalar("memory/occupied", static_cast<double>(*bytes), step);
  }

  void write_histograms(std::int64_t step) {
    const auto parameters = trainer.parameters();
    const auto names = detail::names_of_parameters(trainer.module(), parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      file->add_histogram("parameters/" + names[i], parameters[i], step);
    for (auto& [tag, histogram] : std::exchange(gradients, {})) file->add(tag, histogram, step);
  }

  /// True if the files have this point: a resumed run repeats a validation that followed the state at the same update.
  bool is_written(std::string_view tag, std::int64_t step) const {
    return begun_at > 0 && step == begun_at && detail::event_files_have(options.directory, step, tag);
  }
};

GRADACCUM_INLINE void TensorBoard::attach(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "TensorBoard: directory must be given");
  TORCH_CHECK(every >= 1, "TensorBoard: every must be >= 1, got ", every);
  TORCH_CHECK(histograms_every >= 0, "TensorBoard: histograms_every must be >= 0, got ", histograms_every);
  const auto seconds = flush_every.count();
  TORCH_CHECK(seconds >= 0, "TensorBoard: flush_every must be >= 0 seconds, got ", seconds);
  run.reset(new Run{*this, trainer});
  if (!trainer.is_first()) return;
  detail::check_is_writable(directory);
}

GRADACCUM_INLINE SummaryWriter* TensorBoard::writer() {
  if (!run || !run->writes()) return nullptr;
  if (!run->file) run->open({});
  return run->file.get();
}

GRADACCUM_INLINE std::shared_ptr<void> TensorBoard::fit_scope() {
  run->restart();
  return detail::flush_at_end(run->file);
}

GRADACCUM_INLINE void TensorBoard::state(Archive& archive) {
  if (run->file && !archive.loading()) run->file->flush();
  if (!archive.loading()) return;
  archive.when_all_fit([this] {
    run->begins = true;
    run->restart();
  });
}

GRADACCUM_INLINE void TensorBoard::at_boundary() {
  if (run->file && run->status.done()) run->file->flush();
}

/// Keeps histograms until after the step, so that none are written for a step that an overflow skips. Reads `raw()`,
/// since `values()` would change the gradients.
GRADACCUM_INLINE void TensorBoard::before_step(Gradients& window) {
  run->gradients.clear();
  if (histograms_every == 0 || !run->begun()) return;
  const auto parameters = window.parameters();  // throws with OptimizerInBackward, which keeps no gradients
  if ((run->trainer.updates() + 1) % histograms_every != 0) return;
  if (run->trainer.shards()) {
    TORCH_WARN_ONCE("TensorBoard: histograms of gradients are left out: with {.shard = …} no process has all of them");
    return;
  }
  const auto names = detail::names_of_parameters(run->trainer.module(), parameters);
  const auto raw = window.raw();
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const auto factor = window.multiplier(raw[i].device()).item<double>();
    run->gradients.emplace_back("gradients/" + names[i], detail::histogram_of(raw[i], factor));
  }
}

GRADACCUM_INLINE void TensorBoard::after_step(const Step& step) {
  if (!run->begun()) return;
  if (step.update % every == 0) run->write_numbers(step);
  if (histograms_every > 0 && step.update % histograms_every == 0) run->write_histograms(step.update);
}

GRADACCUM_INLINE void TensorBoard::on_validation(const Validation& validation) {
  const std::chrono::duration<double> seconds(validation.found.seconds);
  if (run->before) *run->before += std::chrono::duration_cast<Run::Clock::duration>(seconds);
  if (!run->begun()) return;
  for (auto& [metric, value] : validation.found.metrics) {
    const auto tag = validation.name + "/" + metric;
    if (!run->is_written(tag, validation.update)) run->file->add_scalar(tag, value, validation.update);
  }
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
