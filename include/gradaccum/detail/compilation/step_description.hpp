// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/formats.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// The graph of a step for batches of one layout.
struct GraphDescription {
  static constexpr std::int64_t no_target = -2, computed_target = -1;
  static constexpr double items_are_rows = 0, computed_items = -1;

  std::string kind;                 ///< `training`; in an exported model also `evaluation` and `inference`
  std::string names = {};           ///< names of the batch's tensors: `input_ids labels`; empty if they have none
  std::string batch = {};           ///< layout: `Float [64, 784], Long [64]`
  std::string any_rows = {};        ///< layout for any number of rows: `Float [*, 784], Long [*]`; else empty
  std::int64_t least_rows = 2;      ///< the least number of rows of that layout
  double items = 1;                 ///< items of the loss, or a constant above
  bool output = false;              ///< true if the loss has an output, for metrics
  std::int64_t target = no_target;  ///< index of the batch's tensor, or a constant above
  std::string trace = {};           ///< name of the file that `save_step` wrote
  std::string operations = {};      ///< CRC-32 of the trace's operations and their constants; empty if not known
  std::string code = {};            ///< name of the compiled code; empty until it is compiled
  std::string gradients = {};       ///< y or n for each parameter: whether the loss depends on it
  std::string moved = {};           ///< y or n for each buffer: whether the step changes it
  std::string capability = {};      ///< CPU capability that it is compiled for, by ATen's name: `AVX512`
};

/// The description of a saved step in its folder's manifest.
struct StepDescription {
  std::string model, modes;  ///< `StepModel::text`
  std::vector<GraphDescription> graphs;

  /// Returns `BFloat16` for the modes `training; BFloat16 autocast`, and `no` for `training; no autocast`.
  std::string autocast() const {
    const auto until_dtype = modes.substr(0, modes.rfind(' '));
    return until_dtype.substr(until_dtype.rfind(' ') + 1);
  }
};

inline constexpr std::string_view step_format = "gradaccum step", exported_format = "gradaccum exported model";

/// Reads and validates a description. Throws `std::runtime_error`, whose message begins with `what`, such as a path.
StepDescription step_description(const Manifest& manifest, const std::string& what);
Manifest manifest_of(const StepDescription& step);

/// A step with code in this program.
struct StepInProgram {
  std::string manifest;
  std::map<std::string, void* const*> code;  ///< by name
};

/// The steps in this program, by name. CMake's `gradaccum_compile_step` adds them before `main` begins.
std::map<std::string, StepInProgram>& steps_in_program();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/compilation/step_graphs.ipp>
#endif
