// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_source.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/listed_files.hpp>

#include <c10/util/Exception.h>

#include <stdexcept>

namespace gradaccum::detail {

GRADACCUM_INLINE StepSource::StepSource(const std::filesystem::path& folder)
    : name_((folder / manifest_name).string()), manifest_(read_manifest(folder, step_format)), folder_(folder) {}

GRADACCUM_INLINE StepSource::StepSource(const std::string& name_in_program) : name_(name_in_program) {
  const auto found = steps_in_program().find(name_in_program);
  if (found == steps_in_program().end()) {
    std::string names;
    for (auto& [name, step] : steps_in_program()) names += " " + name;
    TORCH_CHECK(false, "CompiledStep: InProgram{\"", name_in_program, "\"} must be a step that gradaccum_compile_step ",
                "built into this program, which has", names.empty() ? " none" : names);
  }
  in_program_ = &found->second;
  manifest_ = manifest_of(in_program_->manifest, name_, step_format);
}

GRADACCUM_INLINE StepCode StepSource::code(std::size_t number, const GraphDescription& graph) const {
  if (in_program_) {
    const auto found = in_program_->code.find(graph.code);
    if (found == in_program_->code.end())
      throw std::runtime_error(name_ + ": the program must have its code " + graph.code);
    return StepCode(found->second);
  }
  const auto file = library_of_graph(number, graph);
  const auto listed = manifest_.files.find(file);
  if (listed == manifest_.files.end()) throw std::runtime_error(name_ + ": must list the file " + file);
  check_file(folder_ / file, listed->second);
  return StepCode(folder_ / file, graph.code);
}

}  // namespace gradaccum::detail
