// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_code.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/compilation/steps_in_program.hpp>
#include <gradaccum/detail/io/manifest.hpp>

#include <cstddef>
#include <filesystem>
#include <string>

namespace gradaccum::detail {

/// The source of a compiled step: a folder, or this program.
class StepSource {
 public:
  explicit StepSource(const std::filesystem::path& folder);
  explicit StepSource(const std::string& name_in_program);

  /// The name in error messages.
  const std::string& name() const { return name_; }
  const Manifest& manifest() const { return manifest_; }
  /// Loads the code of a graph. Checks a file against the manifest first.
  StepCode code(std::size_t number, const GraphDescription& graph) const;

 private:
  std::string name_;
  Manifest manifest_;
  std::filesystem::path folder_;
  const StepInProgram* in_program_ = nullptr;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_source.ipp>
#endif
