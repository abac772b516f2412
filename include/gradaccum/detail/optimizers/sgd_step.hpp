// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/numbers.hpp>
#include <gradaccum/detail/optimizers/row_step.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace gradaccum::detail {

class Moves;

/// One parameter's step of SGD, with the tensors that it reads and writes.
struct SgdStep {
  SgdSettings settings;
  at::Tensor parameter, gradient, momentum_buffer;
  std::optional<std::uint64_t> rounding_key = {};  ///< set for stochastic rounding
  std::shared_ptr<const StepRows> rows = {};       ///< rows of the momentum; nullptr: all
};

/// Runs the steps on the CPU in one parallel loop that reads and writes each element once.
void take_on_cpu(const std::vector<SgdStep>& steps, double multiplier);
/// Adds steps by our own kernels if there are any, otherwise by ATen.
void add_moves(Moves& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier);
/// Adds steps by ATen's fused operation.
void add_aten_moves(Moves& moves, const std::vector<SgdStep>& steps, const Multiplier& multiplier);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/optimizers/sgd_step.ipp>
#endif
