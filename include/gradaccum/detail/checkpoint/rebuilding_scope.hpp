// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/saving_scope.hpp>

#include <cstdint>
#include <memory>

namespace gradaccum::detail {

class LayerNormEpsilons;

/// Recomputes results of cheap operations in backward, where other operations would save them. Other tensors are kept
/// as they are outside the scope.
class [[nodiscard]] RebuildingScope final : SavingScope {
 public:
  RebuildingScope();

 private:
  class Hooks;
  GRADACCUM_INLINE std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

  std::uint64_t from_;
  std::shared_ptr<LayerNormEpsilons> epsilons_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/rebuilding_scope.ipp>
#endif
