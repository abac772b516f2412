// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/passes.hpp>

#include <string>
#include <vector>

namespace gradaccum::detail {

/// Finds by experiment why micro-batches do not give what one batch gives: sentences.
///
/// First with all modules in evaluation mode, where only the loss can be a reason: is there any sum of the
/// micro-batches' gradients that is the whole batch's? Then with some modules in training mode.
///
/// `whole`: the gradients of one batch. `equal`: those of the micro-batches were equal to them.
std::vector<std::string> causes_of_difference(VerifyPasses& passes, const GradientList& whole, bool equal);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/causes.ipp>
#endif
