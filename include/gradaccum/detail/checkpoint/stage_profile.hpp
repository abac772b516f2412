// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// What a stage costs, and what its neighbours have to know of it.
struct StageProfile {
  StageCost cost;
  at::Tensor output;                 ///< the next stage's input
  at::Tensor gradient_layout;        ///< of the output's gradient
  at::Tensor input_gradient_layout;  ///< undefined where the input has no gradient
};

/// Runs a stage forward and backward, by itself, to measure what it costs. Its input does not count, nor do gradients
/// of parameters, nor the output of a chain's last stage.
///
/// `gradient_layout`: of the output's gradient; undefined: as the output's own.
StageProfile profile_of(Stage& stage, const at::Tensor& input, const at::Tensor& gradient_layout, bool last,
                        const CheckpointOptions& options);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/stage_profile.ipp>
#endif
