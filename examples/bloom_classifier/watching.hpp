// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <torch/torch.h>

#include <gradaccum/policies/early_stopping.hpp>
#include <gradaccum/policies/profile.hpp>
#include <gradaccum/policies/report.hpp>
#include <gradaccum/policies/tensorboard.hpp>
#include <optional>

#include "options.hpp"

namespace bloom {

namespace ga = gradaccum;

// Policies that observe a training, if their option is given.

inline std::optional<ga::EarlyStopping> stopping_early(const Options& options) {
  if (options.patience == 0) return std::nullopt;
  return ga::EarlyStopping{.patience = options.patience};
}

inline std::optional<ga::TensorBoard> tensorboard(const Options& options) {
  if (options.tensorboard.empty()) return std::nullopt;
  return ga::TensorBoard{.directory = options.tensorboard,
                         .hyperparameters = fmt::format("{}, learning rate {:g}, {} x {} reviews an update, {}",
                                                        options.optimizer, options.learning_rate, options.accumulate,
                                                        options.micro_batch, options.precision)};
}

inline std::optional<ga::Report> report(const Options& options) {
  if (options.report.empty()) return std::nullopt;
  return ga::Report{.path = options.report,
                    .settings = {{"model", options.model},
                                 {"optimizer", options.optimizer},
                                 {"learning rate", fmt::format("{:g}", options.learning_rate)},
                                 {"reviews an update", fmt::format("{} x {}", options.accumulate, options.micro_batch)},
                                 {"precision", options.precision}}};
}

/// Profiles three updates after warming up.
inline std::optional<ga::Profile> profile(const Options& options) {
  if (options.profile.empty()) return std::nullopt;
  return ga::Profile{.updates = {3, 6}, .directory = options.profile};
}

inline void print_profile(auto& trainer) {
  const auto* const policy = trainer.template find_policy<ga::Profile>();
  if (policy && policy->report()) fmt::print("{}", fmt::streamed(*policy->report()));
}

}  // namespace bloom
