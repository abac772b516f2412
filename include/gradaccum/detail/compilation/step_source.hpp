// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/manifest.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// The compiled code of a graph: a function from tensors to tensors.
class StepCode {
 public:
  /// Loads a shared library, whose code runs with this program's rights. Throws `std::runtime_error` with the path.
  StepCode(const std::filesystem::path& library, const std::string& name);
  /// Uses code in this program, by the function table that generated code exports.
  explicit StepCode(void* const* functions);

  std::size_t inputs() const { return inputs_; }
  std::size_t outputs() const { return outputs_; }

  /// Runs the code without autograd and autocast, which are compiled into it. Several threads may call it in turn.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

 private:
  struct Functions;

  std::shared_ptr<void> library_, container_;
  const Functions* functions_ = nullptr;
  std::size_t inputs_ = 0, outputs_ = 0;

  void start(void* const* functions);
};

/// The graph of a step for batches of one layout.
struct GraphDescription {
  static constexpr std::int64_t no_target = -2, computed_target = -1;
  static constexpr double items_are_rows = 0;

  std::string batch;                ///< layout: `Float [64, 784], Long [64]`
  std::string any_rows;             ///< layout for any number of rows: `Float [*, 784], Long [*]`; else empty
  double items = 1;                 ///< items of the loss, or `items_are_rows`
  bool output = false;              ///< true if the loss has an output, for metrics
  std::int64_t target = no_target;  ///< index of the batch's tensor, or a constant above
  std::string trace;                ///< name of the file that `save_step` wrote
  std::string code;                 ///< name of the compiled code; empty until it is compiled
  std::string gradients;            ///< y or n for each parameter: whether the loss depends on it
  std::string moved;                ///< y or n for each buffer: whether the step changes it
  std::string capability;           ///< CPU capability that it is compiled for, by ATen's name: `AVX512`
};

/// The description of a saved step in its folder's manifest.
struct StepDescription {
  std::string model, modes;  ///< `StepModel::text`
  std::vector<GraphDescription> graphs;
};

inline constexpr std::string_view step_format = "gradaccum step";

std::string name_of_graph(std::size_t number);
/// The name of the library file of a graph.
std::string library_of_graph(std::size_t number, const GraphDescription& graph);

Manifest manifest_of(const StepDescription& step);
/// Reads and validates a description. Throws `std::runtime_error`, whose message begins with `what`, such as a path.
StepDescription step_description(const Manifest& manifest, const std::string& what);

/// A step with code in this program.
struct StepInProgram {
  std::string manifest;
  std::map<std::string, void* const*> code;  ///< by name
};

/// The steps in this program, by name. CMake's `gradaccum_compile_step` adds them before `main` begins.
std::map<std::string, StepInProgram>& steps_in_program();

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
