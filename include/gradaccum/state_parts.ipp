// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/state_parts.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/state/generator_states.hpp>
#include <gradaccum/detail/state/module_state.hpp>

#include <c10/util/Exception.h>

namespace gradaccum {

GRADACCUM_INLINE void ModelState::state(Archive& archive) { detail::archive_module(archive, module_); }

GRADACCUM_INLINE void RandomState::state(Archive& archive) { detail::archive_generators(archive); }

GRADACCUM_INLINE void detail::refuse_optimizer(const std::string& type) {
  TORCH_CHECK(false, "OptimizerState: an optimizer of your own, as ", type,
              ", needs a member void state(ga::Archive&)");
}

GRADACCUM_INLINE void detail::check_is_not_divided(bool is_divided, const std::string& type) {
  TORCH_CHECK(!is_divided, "OptimizerState: an optimizer with a state(ga::Archive&) of its own, as ", type,
              ", must not be divided among processes: use {.shard = ga::Shard::none}");
}

}  // namespace gradaccum
