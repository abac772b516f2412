// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/module_of.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void check_points_to_a_module(bool it_does) {
  TORCH_CHECK(it_does, "model: the pointer to it must not be null");
}

}  // namespace gradaccum::detail
