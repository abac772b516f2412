// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/saving_scope.hpp>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// For a scope, tensors are kept for backward as LibTorch keeps them: a checkpoint around what is only measured must
/// not see it, since the measuring will not be repeated.
class [[nodiscard]] MeasuringScope final : SavingScope {
 public:
  MeasuringScope() : SavingScope("CheckpointedSequential") {}

 private:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return nullptr; }
};

/// Takes the hooks of leaves away for a scope: gradients that are only measured are none of their business.
class [[nodiscard]] HooksAway {
 public:
  explicit HooksAway(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)), hooks_(leaves_.size()) {
    for (std::size_t i = 0; i < leaves_.size(); ++i) exchange(i);
  }
  HooksAway(const HooksAway&) = delete;
  HooksAway& operator=(const HooksAway&) = delete;
  ~HooksAway() {
    for (auto i = leaves_.size(); i-- > 0;) exchange(i);  // backwards: one may be there twice
  }

 private:
  void exchange(std::size_t i) { std::swap(torch::autograd::impl::hooks(leaves_[i]), hooks_[i]); }

  std::vector<at::Tensor> leaves_;
  std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> hooks_;
};

}  // namespace gradaccum::detail
