// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace gradaccum::detail {

/// Puts a model into training or evaluation mode, and each of its modules back into its own at the scope's end.
///
/// A model that is in that mode already begins as it is, with all that its owner has frozen in it.
class ModeGuard {
 public:
  ModeGuard(torch::nn::Module& model, bool training);
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;
  ~ModeGuard();

 private:
  explicit ModeGuard(torch::nn::Module& model);

  torch::nn::Module& model_;
  bool was_training_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> modes_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/trainer/mode_guard.ipp>
#endif
