// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <gradaccum/archive.hpp>
#include <gradaccum/fit_options.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/policy.hpp>
#include <gradaccum/process_group.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace bloom {

namespace ga = gradaccum;

/// Returns the sum over all ranks.
inline std::int64_t sum(const ga::ProcessGroup& group, std::int64_t count) {
  const auto all = torch::tensor(count);
  group.all_reduce(all);
  return all.item<std::int64_t>();
}

/// A policy: counts the tokens of successful micro-batches, whose numbers the objective sets. A micro-batch that ran
/// out of memory and runs again counts once.
struct Tokens {
  static constexpr std::string_view name = "tokens";

  std::int64_t* real = nullptr;    // of the current micro-batch
  std::int64_t* padded = nullptr;  // the same, with padding
  std::int64_t all_real = 0, all_padded = 0;

  void before_backward(ga::Loss&) {
    all_real += *real;
    all_padded += *padded;
  }
  void state(ga::Archive& archive) {
    archive("real", all_real);
    archive("padded", all_padded);
  }
};

/// A policy: prints the loss during an epoch, and the accuracies after it.
struct Lines {
  static constexpr std::string_view name = "lines";

  std::int64_t every = 300;     // batches
  ga::ProcessGroup group = {};  // for accuracies over all ranks
  const ga::FitProgress* progress = nullptr;
  std::int64_t shown = -1;    // the last batch printed
  ga::Accuracy trained = {};  // measured on each batch before its update
  bool ends_epoch = false;    // set if the next validation ends the epoch

  void attach(auto& trainer) { progress = &trainer.progress(); }
  void on_epoch_begin(std::int64_t) {
    trained = {};
    shown = -1;
  }
  void before_backward(ga::Loss& loss) {
    trained.add(loss);
    const auto batch = progress->batch - 1;
    if (batch % every == 0 && std::exchange(shown, batch) != batch)  // FitMemory may divide a batch
      say(fmt::format("{} | Batch {:04d}/{:04d} | Loss: {:.4f}", epoch(), batch, progress->batches.value_or(0),
                      loss.mean.item<double>()));
  }
  void on_epoch_end(std::int64_t) { ends_epoch = true; }
  void on_validation(const ga::Validation& validation) {
    const auto validated = 100 * validation.found["accuracy"];
    if (!std::exchange(ends_epoch, false))
      return say(fmt::format("{} | Batch {:04d}/{:04d} | Val acc.: {:.2f}% | Val loss: {:.4f}", epoch(), progress->batch,
                             progress->batches.value_or(0), validated, validation.found["loss"]));
    say(fmt::format("{} | Train acc.: {:.2f}% | Val acc.: {:.2f}%", epoch(), 100 * trained_accuracy(), validated));
    say(fmt::format("Time elapsed {:.2f} min", progress->seconds() / 60));
  }
  /// Saves the counts, so that a resumed epoch's accuracy covers the whole epoch.
  void state(ga::Archive& archive) {
    archive("right", trained.right);
    archive("counted", trained.counted);
  }

 private:
  double trained_accuracy() const {
    const auto all = [&](const at::Tensor& own) {
      return static_cast<double>(sum(group, own.defined() ? own.item<std::int64_t>() : 0));
    };
    const double right = all(trained.right);
    return right / all(trained.counted);
  }
  std::string epoch() const {
    return fmt::format("Epoch: {:04d}/{:04d}", progress->epoch + 1, progress->options.epochs.value_or(1));
  }
  static void say(const std::string& line) {
    fmt::print("{}\n", line);
    std::fflush(stdout);  // show lines immediately, also in a file
  }
};

}  // namespace bloom
