// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace gradaccum::detail {

/// While it lives, decides how tensors that this thread's operations save for backward are kept. Scopes nest: the
/// innermost decides alone.
class SavingScope {
 public:
  SavingScope(const SavingScope&) = delete;
  SavingScope& operator=(const SavingScope&) = delete;

  /// The hooks of one more tensor; nullptr: LibTorch keeps it as it is.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;

  static SavingScope* innermost() { return top(); }

 protected:
  /// `owner`: whose name an error bears.
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
