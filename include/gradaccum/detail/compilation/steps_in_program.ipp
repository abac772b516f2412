// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/steps_in_program.hpp>

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::map<std::string, StepInProgram>& steps_in_program() {
  static std::map<std::string, StepInProgram> steps;
  return steps;
}

}  // namespace gradaccum::detail
