// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace bloom {

/// The optimizer of the name that --optimizer takes: with weights and gradients 16 bytes a parameter (adam, adamw), 10
/// (adamw8bit) or 8 (adafactor).
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                               const std::vector<at::Tensor>& parameters,
                                                               double learning_rate) {
  using namespace gradaccum::optim;
  if (name == "adam") return std::make_unique<Adam>(parameters, AdamOptions(learning_rate));
  if (name == "adamw") return std::make_unique<AdamW>(parameters, AdamWOptions(learning_rate));
  if (name == "adamw8bit") return std::make_unique<AdamW8bit>(parameters, AdamW8bitOptions(learning_rate));
  if (name == "adafactor")
    return std::make_unique<Adafactor>(
        parameters, AdafactorOptions(learning_rate).relative_step(false).scale_parameter(false).warmup_init(false));
  throw std::invalid_argument("optimizer must be adam, adamw, adafactor or adamw8bit, got '" + name + "'");
}

}  // namespace bloom
