// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_code.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <stdexcept>

#include <dlfcn.h>

namespace gradaccum::detail {

/// The functions that tools/compile_step.py makes code export, in this order. Returned strings are errors, or null.
struct StepCode::Functions {
  const char* (*create)(void** container);
  void (*destroy)(void* container);
  const char* (*run)(void* container, void** inputs, void** outputs);
  std::size_t (*inputs)(void* container);
  std::size_t (*outputs)(void* container);
};

GRADACCUM_INLINE StepCode::StepCode(void* const* functions) { start(functions); }

GRADACCUM_INLINE StepCode::StepCode(const std::filesystem::path& library, const std::string& name) {
  const auto path = std::filesystem::absolute(library);
  library_ = {dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), [](void* opened) {
                if (opened) dlclose(opened);
              }};
  if (!library_) throw std::runtime_error(path.string() + ": must be a library that can be loaded, got " + dlerror());
  const auto* const functions = dlsym(library_.get(), ("gradaccum_step_" + name).c_str());
  if (!functions)
    throw std::runtime_error(path.string() + ": must be the code " + name + " of a step, got " + dlerror());
  start(static_cast<void* const*>(functions));
}

GRADACCUM_INLINE void StepCode::start(void* const* functions) {
  functions_ = reinterpret_cast<const Functions*>(functions);
  void* container = nullptr;
  const auto* const error = functions_->create(&container);
  TORCH_CHECK(!error, "CompiledStep: the compiled code must start, got ", error);
  container_ = {container, [destroy = functions_->destroy, library = library_](void* old) { destroy(old); }};
  inputs_ = functions_->inputs(container);
  outputs_ = functions_->outputs(container);
}

GRADACCUM_INLINE std::vector<at::Tensor> StepCode::run(const std::vector<at::Tensor>& inputs) const {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<void*> given, got(outputs_);
  given.reserve(inputs.size());
  for (auto& tensor : inputs) given.push_back(new at::Tensor(tensor));  // the code deletes them, even on failure
  const auto* const error = functions_->run(container_.get(), given.data(), got.data());
  TORCH_CHECK(!error, "CompiledStep: the compiled code failed: ", error);
  std::vector<at::Tensor> outputs;
  outputs.reserve(got.size());
  for (auto* const output : got) {
    const std::unique_ptr<at::Tensor> tensor(static_cast<at::Tensor*>(output));
    outputs.push_back(std::move(*tensor));
  }
  return outputs;
}

}  // namespace gradaccum::detail
