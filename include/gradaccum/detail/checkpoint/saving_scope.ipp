// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/saving_scope.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

namespace gradaccum::detail {

/// An autograd engine that takes saved-tensor hooks from the scopes. An operation requests hooks from the engine for
/// each tensor that it saves. LibTorch's base engine returns none; Python's engine returns Python's hooks.
///
/// Runs backward on the base engine, since LibTorch starts device threads once per process, for the engine that first
/// uses a device.
class C10_EXPORT HookEngine final : public torch::autograd::Engine {
 public:
  ~HookEngine() override { stop(); }  // the base class requires that its threads have ended

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto* const scope = SavingScope::innermost();
    return scope ? scope->hooks() : nullptr;
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
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

GRADACCUM_INLINE SavingScope::SavingScope(const char* owner) : outer_(top()) {
  HookEngine::install(owner);
  top() = this;
}

GRADACCUM_INLINE SavingScope::~SavingScope() {
  for (auto* scope = &top(); *scope; scope = &(*scope)->outer_)  // usually the first
    if (*scope == this) {
      *scope = outer_;
      break;
    }
}

GRADACCUM_INLINE SavingScope*& SavingScope::top() {
  static thread_local SavingScope* scope = nullptr;
  return scope;
}

}  // namespace gradaccum::detail
