// SPDX-License-Identifier: Apache-2.0
// Writes a Trainer's numbers as TensorBoard event files.
#pragma once

#include <gradaccum/policies/tensorboard.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/training/loop.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/summary_writer.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

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

struct TensorBoardRun {
  static constexpr std::string_view name = TensorBoard::name;
  using Clock = std::chrono::steady_clock;

  const TensorBoard& options;
  TrainerBase& trainer;
  const FitProgress& progress = trainer.progress();
  std::shared_ptr<SummaryWriter> file = {};
  bool begins = true;                            // nothing was written since construction or loading
  std::int64_t begun_at = 0;                     // updates before the first write
  std::optional<Clock::time_point> before = {};  // when the last speed was written
  std::int64_t samples_before = 0;
  std::optional<Clock::time_point> measured = {};                      // when memory was measured
  std::vector<std::pair<std::string, ValueHistogram>> gradients = {};  // of the next step

  bool writes() const { return trainer.is_first() && !progress.options.smoke; }

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
    if (begun_at == 0 && !progress.options.resume.empty()) purge_step = 0;  // a run may have died before its state
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
    samples_before = progress.samples;
  }

  void write_numbers(const Step& step) {
    file->add_scalar("train/loss", step.loss.item<double>(), step.update);
    if (!is_nan(step.lr)) file->add_scalar("train/lr", step.lr, step.update);
    if (step.grad_norm.defined()) file->add_scalar("train/grad_norm", step.grad_norm.item<double>(), step.update);
    write_rate(step.update);
    write_memory(step.update);
  }

  void write_rate(std::int64_t step) {
    const auto now = Clock::now();
    const auto last = std::exchange(before, now);
    const auto samples = progress.samples - std::exchange(samples_before, progress.samples);
    const auto seconds = last ? std::chrono::duration<double>(now - *last).count() : 0;
    if (seconds > 0) file->add_scalar("train/samples_per_second", static_cast<double>(samples) / seconds, step);
  }

  void write_memory(std::int64_t step) {
    if (!is_time_to_ask(measured)) return;
    measured = Clock::now();
    const auto device = trainer.device();
    if (const auto bytes = occupied_memory(at::kCPU))
      file->add_scalar("memory/resident", static_cast<double>(*bytes), step);
    if (device.is_cpu()) return;
    if (const auto bytes = occupied_memory(device))
      file->add_scalar("memory/occupied", static_cast<double>(*bytes), step);
  }

  void write_histograms(std::int64_t step) {
    const auto parameters = trainer.parameters();
    const auto names = names_of_parameters(trainer.module(), parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      file->add_histogram("parameters/" + names[i], parameters[i], step);
    for (auto& [tag, histogram] : std::exchange(gradients, {})) file->add(tag, histogram, step);
  }

  /// True if the files have this point: a resumed run repeats a validation that followed the state at the same update.
  bool is_written(std::string_view tag, std::int64_t step) const {
    return begun_at > 0 && step == begun_at && event_files_have(options.directory, step, tag);
  }

  std::shared_ptr<void> fit_scope() {
    restart();
    return flush_at_end(file);
  }

  /// Keeps histograms until after the step, so that none are written for a step that an overflow skips. Reads `raw()`,
  /// since `values()` would change the gradients.
  void before_step(Gradients& window) {
    gradients.clear();
    if (options.histograms_every == 0 || !begun()) return;
    const auto parameters = window.parameters();  // throws with OptimizerInBackward, which keeps no gradients
    if ((trainer.updates() + 1) % options.histograms_every != 0) return;
    if (Loop::of(trainer).peers() && Loop::of(trainer).peers()->shards()) {
      TORCH_WARN_ONCE(
          "TensorBoard: histograms of gradients are left out: with {.shard = …} no process has all of them");
      return;
    }
    const auto names = names_of_parameters(trainer.module(), parameters);
    const auto raw = window.raw();
    for (std::size_t i = 0; i < raw.size(); ++i) {
      const auto factor = window.multiplier(raw[i].device()).item<double>();
      gradients.emplace_back("gradients/" + names[i], histogram_of(raw[i], factor));
    }
  }

  void after_step(const Step& step) {
    if (!begun()) return;
    if (step.update % options.every == 0) write_numbers(step);
    if (options.histograms_every > 0 && step.update % options.histograms_every == 0) write_histograms(step.update);
  }

  void on_validation(const Validation& validation) {
    const std::chrono::duration<double> seconds(validation.found.seconds);
    if (before) *before += std::chrono::duration_cast<Clock::duration>(seconds);
    if (!begun()) return;
    for (auto& [metric, value] : validation.found.metrics) {
      const auto tag = validation.name + "/" + metric;
      if (!is_written(tag, validation.update)) file->add_scalar(tag, value, validation.update);
    }
  }

  void at_boundary() const {
    if (file && progress.done()) file->flush();
  }

  /// Saves nothing, but flushes the file, so that it has all points of the saved updates.
  void state(Archive& archive) {
    if (!archive.loading()) {
      if (file) file->flush();
      return;
    }
    archive.when_all_fit([this] {
      begins = true;
      restart();
    });
  }
};

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<PolicyRun> TensorBoard::Running::start(TrainerBase& trainer) {
  TORCH_CHECK(!directory.empty(), "TensorBoard: directory must be given");
  TORCH_CHECK(every >= 1, "TensorBoard: every must be >= 1, got ", every);
  TORCH_CHECK(histograms_every >= 0, "TensorBoard: histograms_every must be >= 0, got ", histograms_every);
  const auto seconds = flush_every.count();
  TORCH_CHECK(seconds >= 0, "TensorBoard: flush_every must be >= 0 seconds, got ", seconds);
  if (trainer.is_first()) detail::check_is_writable(directory);
  return detail::started_and_kept<detail::TensorBoardRun>(run_, *this, trainer);
}

GRADACCUM_INLINE SummaryWriter* TensorBoard::Running::writer() {
  if (!run_ || !run_->writes()) return nullptr;
  if (!run_->file) run_->open({});
  return run_->file.get();
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
