// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/exported_model.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/validate.hpp>
#include <gradaccum/trainer.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "options.hpp"

/// The training itself. Read this file first.
namespace exported_model {

namespace ga = gradaccum;

using Batches = ga::data::NamedTensorBatches;

inline ga::Loss objective(ga::ExportedModel& model, const ga::io::Tensors& batch) { return model->loss(batch); }

inline std::vector<at::Tensor> trained_parameters(const ga::ExportedModel& model) {
  auto parameters = model->parameters();
  std::erase_if(parameters, [](const auto& parameter) { return !parameter.requires_grad(); });
  return parameters;
}

/// Returns whether there is one class per row, so that an accuracy can be computed; a language model has none.
inline bool predicts_classes(ga::ExportedModel& model, Batches& batches) {
  model->eval();
  const auto loss = model->loss(*batches.begin());
  model->train();
  return loss.output.defined() && loss.output.dim() == 2 && loss.output.size(1) > 1 && loss.target.defined() &&
         loss.target.dim() == 1 && loss.target.scalar_type() == at::kLong;
}

inline std::string text_of(const ga::Evaluation& found) {
  auto text = fmt::format("validation loss {:.4f}", found["loss"]);
  if (found.metrics.contains("accuracy")) text += fmt::format(", accuracy {:.1f} %", 100 * found["accuracy"]);
  return text;
}

/// A policy: prints the loss of each epoch, and results of validations.
struct Lines {
  static constexpr std::string_view name = "lines";

  double sum = 0, items = 0;  // of the epoch's losses

  void on_epoch_begin(std::int64_t) { sum = items = 0; }
  void after_step(const ga::Step& step) {
    sum += step.items * step.loss.item<double>();
    items += step.items;
  }
  void on_epoch_end(std::int64_t epoch) const { print("epoch {}: training loss {:.4f}\n", epoch + 1, sum / items); }
  /// Saves the sums, so that a resumed epoch's loss includes the batches before.
  void state(ga::Archive& archive) {
    archive("sum", sum);
    archive("items", items);
  }
  void on_validation(const ga::Validation& validation) const { print("  {}\n", text_of(validation.found)); }

  template <class... Values>
  static void print(fmt::format_string<Values...> format, Values&&... values) {
    fmt::print(format, std::forward<Values>(values)...);
    std::fflush(stdout);  // show lines immediately, also in a file
  }
};

/// Makes the policy that saves states, if --save is given.
inline std::optional<ga::SaveState> saving(const Options& options) {
  if (options.save.empty()) return std::nullopt;
  return ga::SaveState{.directory = options.save, .every_updates = 500, .on_signals = true};
}

inline std::optional<ga::Report> report(const Options& options) {
  if (options.report.empty()) return std::nullopt;
  return ga::Report{.path = options.report,
                    .title = options.model,
                    .settings = {{"data", options.data},
                                 {"rows a batch", fmt::format("{}", options.batch_size)},
                                 {"batches an update", fmt::format("{}", options.accumulate)},
                                 {"learning rate", fmt::format("{:g}", options.learning_rate)},
                                 {"largest norm", fmt::format("{:g}", options.clip)}}};
}

/// Warms up for a twentieth of the updates. The Trainer gives the schedule their number.
inline ga::Schedule<ga::lr::Cosine> schedule(const Batches& batches, const Options& options) {
  const auto updates = options.epochs * ((batches.size() + options.accumulate - 1) / options.accumulate);
  return {ga::lr::Cosine{.peak = options.learning_rate, .warmup = updates / 20}};
}

/// Loads a file's tensors onto the model's device.
inline Batches batches_of(const std::string& file, at::Device device, const Options& options, bool shuffle) {
  auto tensors = ga::io::load_file(file);
  for (auto& [name, tensor] : tensors) tensor = tensor.to(device);
  Batches batches(tensors, {.batch_size = options.batch_size, .shuffle = shuffle});
  if (batches.size() == 0) throw std::runtime_error(file + ": must have rows, got none");
  return batches;
}

inline ga::FitReport train(ga::ExportedModel& model, const Options& options) {
  const auto device = model->parameters().front().device();
  auto batches = batches_of(options.data, device, options, /*shuffle=*/true);
  std::optional<Batches> unseen;
  if (!options.validation.empty()) unseen = batches_of(options.validation, device, options, /*shuffle=*/false);
  const bool has_classes = unseen && predicts_classes(model, *unseen);

  ga::optim::AdamW optimizer(trained_parameters(model), ga::optim::AdamWOptions(options.learning_rate));
  std::optional<ga::Validate<Batches&>> loss;
  std::optional<ga::Validate<Batches&, ga::Accuracy>> accuracy;
  if (has_classes)
    accuracy.emplace(*unseen, ga::Accuracy{});
  else if (unseen)
    loss.emplace(*unseen);
  ga::Trainer trainer(model, optimizer, objective, ga::Accumulate{.steps = options.accumulate},
                      ga::ClipNorm{.max = options.clip}, schedule(batches, options), ga::Progress{}, loss, accuracy,
                      Lines{}, report(options), saving(options));
  if (unseen)
    Lines::print("before: {}\n",
                 text_of(has_classes ? trainer.evaluate(*unseen, ga::Accuracy{}) : trainer.evaluate(*unseen)));
  return trainer.fit(batches, {.epochs = options.epochs, .resume = options.resume ? options.save : ""});
}

}  // namespace exported_model
