// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/verification/passes.hpp>

#include <string>
#include <vector>

namespace gradaccum::detail {

/// Finds by experiment why micro-batches give other gradients than one batch. Returns a sentence per cause.
///
/// Starts with all modules in evaluation mode, where only the loss can be a cause, and looks for a weighted sum of the
/// micro-batches' gradients that equals the whole batch's. Continues with some modules in training mode.
///
/// `whole` holds the gradients of one batch. `equal` says that those of the micro-batches were equal to them.
std::vector<std::string> causes_of_difference(VerifyPasses& passes, const GradientList& whole, bool equal);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/causes.ipp>
#endif
