// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

namespace gradaccum::detail {

/// The inputs of a recorded operation. `RecordFunction::inputs()` cannot be used: in a program built without NDEBUG it
/// asserts a flag that a release build of LibTorch never sets.
template <auto inputs>
struct RecordedInputs {
  friend c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& operation) {
    return operation.*inputs;
  }
};
c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& operation);
template struct RecordedInputs<&at::RecordFunction::inputs_>;  // explicit instantiations may name private members

}  // namespace gradaccum::detail
