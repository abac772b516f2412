// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/steps.hpp>
#include <gradaccum/detail/window/multiplier.hpp>

namespace gradaccum::detail {

/// Returns the factor as a number on the host. Synchronizes if a device knows a part of it.
double host_number(const Multiplier& multiplier);

/// Prepares a step that has the current state, whose tensors may be undefined. A sparse gradient steps only its rows if
/// possible; with 8-bit moments, only if rows are whole blocks.
AdamStep prepared(AdamStep step, const Multiplier& multiplier);
SgdStep prepared(SgdStep step, const Multiplier& multiplier);
Adam8bitStep prepared(Adam8bitStep step, const Multiplier& multiplier);

/// Returns moments as the state stores them: after a step by rows a sparse tensor of these, else unchanged.
template <class Step>
at::Tensor state_tensor(const Step& step, const at::Tensor& moments);

/// Runs one parameter's step by rows.
template <class Step>
void step_rows(const Step& step, typename Step::Operand operand);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/optimizers/row_steps.ipp>
#endif
