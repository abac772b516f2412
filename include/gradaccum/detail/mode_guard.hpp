// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Puts a model into training or evaluation mode, and each of its modules back into its own at the scope's end.
///
/// A model that is in that mode already stays as it is, with all that its owner has frozen in it.
class ModeGuard {
 public:
  ModeGuard(torch::nn::Module& model, bool training) : model_(model), was_training_(model.is_training()) {
    if (training == was_training_) return;
    parts_ = model.modules(/*include_self=*/false);
    for (auto& part : parts_) modes_.push_back(part->is_training());
    model.train(training);
  }
  ModeGuard(const ModeGuard&) = delete;
  ModeGuard& operator=(const ModeGuard&) = delete;
  ~ModeGuard() {
    try {
      restore();
    } catch (...) {  // by a train() of the user's own; a destructor has nobody to tell
    }
  }

 private:
  void restore() {
    if (model_.is_training() != was_training_) model_.train(was_training_);
    for (std::size_t i = 0; i < parts_.size(); ++i)  // those outside come first, and take those inside with them
      if (parts_[i]->is_training() != modes_[i]) parts_[i]->train(modes_[i]);
  }

  torch::nn::Module& model_;
  bool was_training_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> modes_;
};

}  // namespace gradaccum::detail
