// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/concepts.hpp>

#include <concepts>
#include <type_traits>

namespace gradaccum::detail {

template <class O>
TakesGradients* as_takes_gradients(O& optimizer) {
  if constexpr (std::is_polymorphic_v<O>) return dynamic_cast<TakesGradients*>(&optimizer);
  return nullptr;
}

/// The one place where an optimizer gets its gradients. True if the parameters moved.
///
/// @note Waits for the device only where the gradients are required to be finite: a 4-byte read.
template <optimizer O>
bool take_step(O& optimizer, Gradients gradients) {
  TakesGradients* const takes = as_takes_gradients(optimizer);
  constexpr bool takes_by_itself = takes_gradients<O> && !std::derived_from<O, TakesGradients>;
  if (!takes && !takes_by_itself) gradients.apply();
  if (gradients.raw().empty()) return false;
  if (gradients.overflowed()) return false;
  if (takes)
    takes->step(gradients);
  else if constexpr (takes_by_itself)
    optimizer.step(gradients);
  else
    optimizer.step();
  return true;
}

}  // namespace gradaccum::detail
