// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace gradaccum::detail {

/// Decides, while it lives, how tensors that this thread's operations save for backward are kept. Scopes nest; only the
/// innermost decides.
class SavingScope {
 public:
  SavingScope(const SavingScope&) = delete;
  SavingScope& operator=(const SavingScope&) = delete;

  /// Returns the hooks for one saved tensor. If nullptr, LibTorch keeps the tensor as it is.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;

  static SavingScope* innermost() { return top(); }

 protected:
  /// `owner` is the name that begins error messages.
  explicit SavingScope(const char* owner);
  GRADACCUM_INLINE virtual ~SavingScope();
  SavingScope* outer() const { return outer_; }

 private:
  static SavingScope*& top();

  SavingScope* outer_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/saving_scope.ipp>
#endif
