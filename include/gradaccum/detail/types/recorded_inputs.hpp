// SPDX-License-Identifier: Apache-2.0
// Reads a private member of at::RecordFunction, because in a program that is built without NDEBUG its public `inputs()`
// asserts a flag that a release build of LibTorch never sets.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

namespace gradaccum::detail {

template <auto inputs>
struct RecordedInputs {
  friend c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& operation) {
    return operation.*inputs;
  }
};
/// Returns the inputs of a recorded operation.
c10::ArrayRef<const c10::IValue> recorded_inputs(const at::RecordFunction& operation);
template struct RecordedInputs<&at::RecordFunction::inputs_>;  // explicit instantiations may name private members

}  // namespace gradaccum::detail
