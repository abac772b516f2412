// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace gradaccum::detail {

/// Puts a model into training or evaluation mode, and each of its modules back into its own at the scope's end.
///
/// A model that is in that mode already begins as it is, with all that its owner has frozen in it.
class ModeGuard {
 public:
  ModeGuard(torch::nn::Module& model, bool training) : ModeGuard(model) {
    if (training != was_training_) model.train(training);  // if that throws, the destructor runs all the same
  }
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;
  ~ModeGuard() {
    restore(model_, was_training_);
    for (std::size_t i = 0; i < parts_.size(); ++i)  // those outside come first, and take those inside with them
      restore(*parts_[i], modes_[i]);
  }

 private:
  explicit ModeGuard(torch::nn::Module& model)
      : model_(model), was_training_(model.is_training()), parts_(model.modules(/*include_self=*/false)) {
    for (auto& part : parts_) modes_.push_back(part->is_training());
  }

  static void restore(torch::nn::Module& module, bool training) noexcept {
    try {
      if (module.is_training() != training) module.train(training);
    } catch (...) {  // by a train() of the user's own; a destructor has nobody to tell
    }
  }

  torch::nn::Module& model_;
  bool was_training_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> modes_;
};

}  // namespace gradaccum::detail
