// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>

namespace gradaccum::detail {

/// The inputs of an operation that is recorded. `RecordFunction::inputs()` is for programs that are built as LibTorch
/// itself was: without NDEBUG it asserts what a LibTorch that was built for release never sets.
template <auto inputs>
struct RecordedInputs {
  friend c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& operation) {
    return operation.*inputs;
  }
};
c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& operation);
template struct RecordedInputs<&at::RecordFunction::inputs_>;  // an explicit instantiation may name what is private

/// Notes the epsilon of each LayerNorm that runs on this thread, by the number of its node: the node has all that it
/// takes to run it again, but for that.
class LayerNormEpsilons {
 public:
  LayerNormEpsilons()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {
    ++noted().scopes;
  }
  LayerNormEpsilons(const LayerNormEpsilons&) = delete;
  LayerNormEpsilons& operator=(const LayerNormEpsilons&) = delete;
  ~LayerNormEpsilons() {
    at::removeCallback(handle_);
    if (--noted().scopes == 0) noted().epsilons.clear();
  }

  static std::optional<double> of(std::uint64_t sequence_number) {
    const auto found = noted().epsilons.find(sequence_number);
    return found == noted().epsilons.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  struct Noted {
    std::unordered_map<std::uint64_t, double> epsilons;
    int scopes = 0;
  };
  static Noted& noted() {
    static thread_local Noted noted;
    return noted;
  }

  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
    if (std::string_view(operation.name()) != "aten::native_layer_norm" || operation.seqNr() < 0) return nullptr;
    const auto inputs = recorded_inputs(operation);
    if (inputs.size() == 5 && inputs[4].isDouble())
      noted().epsilons[static_cast<std::uint64_t>(operation.seqNr())] = inputs[4].toDouble();
    return nullptr;
  }

  at::CallbackHandle handle_;
};

}  // namespace gradaccum::detail
