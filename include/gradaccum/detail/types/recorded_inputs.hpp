// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

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

}  // namespace gradaccum::detail
