// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace bloom {

namespace detail {

/// Rounds bfloat16 parameters stochastically; other dtypes are not affected.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make_rounding(const std::vector<at::Tensor>& parameters,
                                                       const Options& options, std::uint64_t seed) {
  auto optimizer = std::make_unique<Optimizer>(parameters, options);
  optimizer->stochastic_rounding(seed);
  return optimizer;
}

}  // namespace detail

/// Makes the optimizer that --optimizer names. Weights, gradients and moments take 16 bytes per parameter (adam,
/// adamw), 10 (adamw8bit) or 8 (adafactor). All but adafactor keep moments only for the words that have occurred.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                               const std::vector<at::Tensor>& parameters,
                                                               double learning_rate, std::uint64_t seed = 0) {
  using namespace gradaccum::optim;
  if (name == "adam") return detail::make_rounding<Adam>(parameters, AdamOptions(learning_rate), seed);
  if (name == "adamw") return detail::make_rounding<AdamW>(parameters, AdamWOptions(learning_rate), seed);
  if (name == "adamw8bit") return detail::make_rounding<AdamW8bit>(parameters, AdamW8bitOptions(learning_rate), seed);
  if (name == "adafactor")
    return detail::make_rounding<Adafactor>(
        parameters, AdafactorOptions(learning_rate).relative_step(false).scale_parameter(false).warmup_init(false),
        seed);
  throw std::invalid_argument("optimizer must be adam, adamw, adafactor or adamw8bit, got '" + name + "'");
}

}  // namespace bloom
