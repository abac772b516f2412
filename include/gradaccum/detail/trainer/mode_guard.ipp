// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/trainer/mode_guard.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>

namespace gradaccum::detail {

GRADACCUM_INLINE void restore_mode(torch::nn::Module& module, bool training) noexcept {
  try {
    if (module.is_training() != training) module.train(training);
  } catch (...) {  // by a train() of the user's own; a destructor has nobody to tell
  }
}

GRADACCUM_INLINE ModeGuard::ModeGuard(torch::nn::Module& model)
    : model_(model), was_training_(model.is_training()), parts_(model.modules(/*include_self=*/false)) {
  for (auto& part : parts_) modes_.push_back(part->is_training());
}

GRADACCUM_INLINE ModeGuard::ModeGuard(torch::nn::Module& model, bool training) : ModeGuard(model) {
  if (training != was_training_) model.train(training);  // if that throws, the destructor runs all the same
}

GRADACCUM_INLINE ModeGuard::~ModeGuard() {
  restore_mode(model_, was_training_);
  for (std::size_t i = 0; i < parts_.size(); ++i)  // those outside come first, and take those inside with them
    restore_mode(*parts_[i], modes_[i]);
}

}  // namespace gradaccum::detail
