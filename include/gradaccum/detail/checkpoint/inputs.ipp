// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/inputs.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>

namespace gradaccum::detail {

struct KeptTensors::Kept {
  explicit Kept(at::Tensor& handle)
      : version(handle), tensor(std::exchange(handle, at::Tensor()), /*is_output=*/false) {}

  TensorVersion version;
  torch::autograd::SavedVariable tensor;
};

GRADACCUM_INLINE KeptTensors::KeptTensors() = default;
GRADACCUM_INLINE KeptTensors::~KeptTensors() = default;

GRADACCUM_INLINE void KeptTensors::keep(at::Tensor& tensor) { kept_.emplace_back(tensor); }

GRADACCUM_INLINE at::Tensor KeptTensors::bring_back(std::size_t i) const {
  at::Tensor tensor = kept_[i].tensor.unpack();
  // Returns an alias: a hook that the function registers on its input is on the original already.
  if (tensor.requires_grad() && tensor.layout() == at::kStrided) return tensor.alias();
  return tensor;
}

GRADACCUM_INLINE void KeptTensors::check_unchanged() {
  const auto changed = std::ranges::find_if(kept_, [](auto& kept) { return kept.version.changed(); });
  if (changed == kept_.end()) return;
  for (auto& kept : kept_) kept.tensor.reset_data();  // breaks a reference cycle with the changing operation
  TORCH_CHECK(false, "checkpoint: the function must leave its inputs as they are, and changes tensor ",
              changed - kept_.begin(),
              " of them in place, so that running it again would start from something else; let it clone that "
              "input first (an inplace activation at its beginning: without inplace)");
}

}  // namespace gradaccum::detail
