// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/policies/tensorboard.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/memory/occupied_memory.hpp>
#include <gradaccum/detail/watching/event.hpp>
#include <gradaccum/detail/watching/event_file.hpp>
#include <gradaccum/trainer_base.hpp>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cerrno>
#include <cmath>
#include <unordered_map>

#include <unistd.h>

namespace gradaccum {

namespace detail {

/// What a module calls these; those that are none of its own are numbered.
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

GRADACCUM_INLINE void TensorBoard::attach(TrainerBase& to) {
  TORCH_CHECK(!directory.empty(), "TensorBoard: directory must be given");
  TORCH_CHECK(every >= 1, "TensorBoard: every must be >= 1, got ", every);
  TORCH_CHECK(histograms_every >= 0, "TensorBoard: histograms_every must be >= 0, got ", histograms_every);
  const auto seconds = flush_every.count();
  TORCH_CHECK(seconds >= 0, "TensorBoard: flush_every must be >= 0 seconds, got ", seconds);
  trainer = &to;
  status = &to.status();
  writes = to.is_first();
  if (!writes) return;
  detail::make_directory(directory);
  if (::access(directory.c_str(), W_OK | X_OK) != 0)
    detail::file_error(directory, "must be a directory that can be written to", errno);
}

GRADACCUM_INLINE SummaryWriter* TensorBoard::writer() {
  if (!writes || status->options.smoke) return nullptr;
  if (!file) open({});
  return file.get();
}

GRADACCUM_INLINE void TensorBoard::open(std::optional<std::int64_t> purge_step) {
  file = std::make_shared<SummaryWriter>(
      SummaryWriterOptions{.directory = directory, .flush_every = flush_every, .purge_step = purge_step});
}

/// Not when the trainer is built or loaded: then it is not known yet whether this goes on from a state, and whether
/// there will be a training at all.
GRADACCUM_INLINE SummaryWriter* TensorBoard::begun() {
  if (!writes || status->options.smoke) return nullptr;
  if (!begins) return file.get();
  std::optional<std::int64_t> purge_step;
  if (begun_at > 0) purge_step = begun_at + 1;
  if (begun_at == 0 && !status->options.resume.empty()) purge_step = 0;  // killed before its first state
  if (purge_step || !file) open(purge_step);
  if (!hyperparameters.empty()) file->add_text("hyperparameters", hyperparameters, purge_step.value_or(0));
  begins = false;
  return file.get();
}

GRADACCUM_INLINE void TensorBoard::begin() {
  begins = true;
  restart();
}

GRADACCUM_INLINE void TensorBoard::restart() {
  if (begins) begun_at = trainer->updates();
  gradients.clear();
  measured.reset();
  before = detail::PointOfRate{.samples = status->samples};
}

GRADACCUM_INLINE detail::FlushAtEnd<SummaryWriter> TensorBoard::fit_scope() {
  restart();
  return {file};
}

GRADACCUM_INLINE void TensorBoard::state(Archive& archive) {
  if (archive.loading()) return archive.when_all_fit([this] { begin(); });
  if (file) file->flush();
}

GRADACCUM_INLINE void TensorBoard::at_boundary() {
  if (file && status->done()) file->flush();
}

/// Those of a step that is left out, after an overflow, are never written; nor are gradients changed, by `values()`.
GRADACCUM_INLINE void TensorBoard::before_step(Gradients& window) {
  gradients.clear();
  if (histograms_every == 0 || !begun()) return;
  const auto parameters = window.parameters();  // says that there are none, with OptimizerInBackward
  if ((trainer->updates() + 1) % histograms_every != 0) return;
  if (trainer->shards()) {
    TORCH_WARN_ONCE("TensorBoard: histograms of gradients are left out: with {.shard = …} no process has all of them");
    return;
  }
  const auto names = detail::names_of_parameters(trainer->module(), parameters);
  const auto raw = window.raw();
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const auto factor = window.multiplier(raw[i].device()).item<double>();
    gradients.emplace_back("gradients/" + names[i], detail::histogram_of(raw[i], factor));
  }
}

GRADACCUM_INLINE void TensorBoard::after_step(const Step& step) {
  if (!begun()) return;
  if (step.update % every == 0) write_numbers(step);
  if (histograms_every > 0 && step.update % histograms_every == 0) write_histograms(step.update);
}

GRADACCUM_INLINE void TensorBoard::write_numbers(const Step& step) {
  file->add_scalar("train/loss", step.loss.item<double>(), step.update);
  if (!std::isnan(step.lr)) file->add_scalar("train/lr", step.lr, step.update);
  if (step.grad_norm.defined()) file->add_scalar("train/grad_norm", step.grad_norm.item<double>(), step.update);
  write_rate(step.update);
  write_memory(step.update);
}

GRADACCUM_INLINE void TensorBoard::write_memory(std::int64_t step) {
  if (!detail::is_time_to_ask(measured)) return;
  measured = FitStatus::Clock::now();
  const auto device = trainer->device();
  if (const auto bytes = detail::occupied_memory(at::kCPU))
    file->add_scalar("memory/resident", static_cast<double>(*bytes), step);
  if (device.is_cpu()) return;
  if (const auto bytes = detail::occupied_memory(device))
    file->add_scalar("memory/occupied", static_cast<double>(*bytes), step);
}

GRADACCUM_INLINE void TensorBoard::write_rate(std::int64_t step) {
  const detail::PointOfRate now{.samples = status->samples};
  const auto last = std::exchange(before, now);
  if (!last) return;
  const auto seconds = std::chrono::duration<double>(now.time - last->time).count();
  if (seconds > 0)
    file->add_scalar("train/samples_per_second", static_cast<double>(now.samples - last->samples) / seconds, step);
}

GRADACCUM_INLINE void TensorBoard::write_histograms(std::int64_t step) {
  const auto parameters = trainer->parameters();
  const auto names = detail::names_of_parameters(trainer->module(), parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    file->add_histogram("parameters/" + names[i], parameters[i], step);
  for (auto& [tag, histogram] : std::exchange(gradients, {})) file->add_histogram(tag, histogram, step);
}

/// A state may be older than a validation of the same update, which is then made again: there is a point already.
GRADACCUM_INLINE bool TensorBoard::is_written(std::string_view tag, std::int64_t step) const {
  return begun_at > 0 && step == begun_at &&
         detail::event_files_have(directory, detail::bytes_of_scalar_events(step, tag));
}

GRADACCUM_INLINE void TensorBoard::on_validation(const Validation& validation) {
  using Duration = FitStatus::Clock::duration;
  const std::chrono::duration<double> seconds(validation.found.seconds);
  if (before) before->time += std::chrono::duration_cast<Duration>(seconds);
  if (!begun()) return;
  for (auto& [metric, value] : validation.found.metrics) {
    const auto tag = validation.name + "/" + metric;
    if (!is_written(tag, validation.update)) file->add_scalar(tag, value, validation.update);
  }
}

}  // namespace gradaccum
