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

/// Over all processes.
inline std::int64_t sum(const ga::ProcessGroup& group, std::int64_t count) {
  const auto all = torch::tensor(count);
  group.all_reduce(all);
  return all.item<std::int64_t>();
}

/// A policy: counts the tokens that are learned from. The objective says of which micro-batch they are; one that ran
/// out of memory and runs again counts once.
struct Tokens {
  static constexpr std::string_view name = "tokens";

  std::int64_t* real = nullptr;    // of the micro-batch in hand
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

/// A policy: prints the loss on the way, and the accuracies of an epoch.
struct Lines {
  static constexpr std::string_view name = "lines";

  std::int64_t every = 300;     // batches
  ga::ProcessGroup group = {};  // whose accuracies are one
  const ga::FitStatus* status = nullptr;
  std::int64_t shown = -1;    // the last batch that was
  ga::Accuracy trained = {};  // as the model was when it saw each batch
  bool ends_epoch = false;    // the next validation does

  void attach(auto& trainer) { status = &trainer.status(); }
  void on_epoch_begin(std::int64_t) {
    trained = {};
    shown = -1;
  }
  void before_backward(ga::Loss& loss) {
    trained.add(loss);
    const auto batch = status->batch - 1;
    if (batch % every == 0 && std::exchange(shown, batch) != batch)  // it may come in parts
      say(fmt::format("{} | Batch {:04d}/{:04d} | Loss: {:.4f}", epoch(), batch, status->batches.value_or(0),
                      loss.mean.item<double>()));
  }
  void on_epoch_end(std::int64_t) { ends_epoch = true; }
  void on_validation(const ga::Validation& validation) {
    const auto validated = 100 * validation.found["accuracy"];
    if (!std::exchange(ends_epoch, false))
      return say(fmt::format("{} | Batch {:04d}/{:04d} | Val acc.: {:.2f}% | Val loss: {:.4f}", epoch(), status->batch,
                             status->batches.value_or(0), validated, validation.found["loss"]));
    say(fmt::format("{} | Train acc.: {:.2f}% | Val acc.: {:.2f}%", epoch(), 100 * trained_accuracy(), validated));
    say(fmt::format("Time elapsed {:.2f} min", status->seconds() / 60));
  }
  /// So that the accuracy of an epoch is that of the whole epoch, also where it was stopped in between.
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
    return fmt::format("Epoch: {:04d}/{:04d}", status->epoch + 1, status->options.epochs.value_or(1));
  }
  static void say(const std::string& line) {
    fmt::print("{}\n", line);
    std::fflush(stdout);  // now, also where the output is a file that somebody follows
  }
};

}  // namespace bloom
