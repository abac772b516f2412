// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
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
  virtual ~SavingScope() {
    for (auto* scope = &top(); *scope; scope = &(*scope)->outer_)  // as a rule the first
      if (*scope == this) {
        *scope = outer_;
        break;
      }
  }
  SavingScope* outer() const { return outer_; }

 private:
  static SavingScope*& top() {
    static thread_local SavingScope* scope = nullptr;
    return scope;
  }

  SavingScope* outer_;
};

/// LibTorch's engine of autograd, which asks the scopes. An operation asks the engine for each tensor that it saves;
/// the plain engine has no answer, Python's has Python's hooks.
class C10_EXPORT HookEngine final : public torch::autograd::Engine {
 public:
  ~HookEngine() override { stop(); }  // the base class wants its threads to be gone before

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto* const scope = SavingScope::innermost();
    return scope ? scope->hooks() : nullptr;
  }

  static void install(const char* owner) {
    auto& engine = get_default_engine();
    if (&engine == &instance()) return;
    TORCH_CHECK(&engine == &get_base_engine(), owner,
                ": LibTorch's own engine of autograd must be at work, got another one (Python's, where its torch is "
                "loaded in this process); use Python's torch.autograd.graph there");
    torch::autograd::set_default_engine_stub(&HookEngine::instance);
  }

 private:
  static torch::autograd::Engine& instance() {
    static HookEngine engine;
    return engine;
  }
};

inline SavingScope::SavingScope(const char* owner) : outer_(top()) {
  HookEngine::install(owner);
  top() = this;
}

}  // namespace gradaccum::detail
