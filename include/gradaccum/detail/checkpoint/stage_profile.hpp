// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/chain.hpp>
#include <gradaccum/detail/checkpoint/schedule.hpp>

#include <ATen/core/Tensor.h>

namespace gradaccum::detail {

/// The cost of a stage, and the data that measuring its neighbours needs.
struct StageProfile {
  StageCost cost;
  at::Tensor output;                 ///< the next stage's input
  at::Tensor gradient_layout;        ///< layout of the output's gradient
  at::Tensor input_gradient_layout;  ///< layout of the input's gradient; undefined if it has none
};

/// Measures the cost of a stage by running it alone, forward and backward. Excludes its input, gradients of parameters,
/// and the output of a chain's last stage.
///
/// `gradient_layout` is the layout of the output's gradient; if undefined, that of the output.
StageProfile profile_of(Stage& stage, const at::Tensor& input, const at::Tensor& gradient_layout, bool last,
                        const CheckpointOptions& options);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/checkpoint/stage_profile.ipp>
#endif
