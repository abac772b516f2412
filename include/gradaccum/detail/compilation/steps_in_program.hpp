// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <map>
#include <string>

namespace gradaccum::detail {

/// A step with code in this program.
struct StepInProgram {
  std::string manifest;
  std::map<std::string, void* const*> code;  ///< by name
};

/// The steps in this program, by name. CMake's `gradaccum_compile_step` adds them before `main` begins.
std::map<std::string, StepInProgram>& steps_in_program();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/steps_in_program.ipp>
#endif
