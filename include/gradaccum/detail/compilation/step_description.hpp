// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/manifest.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum::detail {

/// The graph of a step for batches of one layout.
struct GraphDescription {
  static constexpr std::int64_t no_target = -2, computed_target = -1;
  static constexpr double items_are_rows = 0;

  std::string batch;                ///< `Float [64, 784], Long [64]`
  std::string any_rows;             ///< of a graph for any number of rows: `Float [*, 784], Long [*]`; else empty
  double items = 1;                 ///< of the loss; or `items_are_rows`
  bool output = false;              ///< the loss has one, for metrics
  std::int64_t target = no_target;  ///< the batch's tensor of this number, or one of those above
  std::string trace;                ///< the file that `save_step` wrote
  std::string code;                 ///< the name of the compiled code; empty before there is any
  std::string gradients;            ///< y or n for each parameter: whether the loss depends on it
  std::string moved;                ///< y or n for each buffer: whether the step changes it
  std::string capability;           ///< the processor that it was compiled for, as ATen names it: `AVX512`
};

/// What a saved step says of itself, in the manifest of its folder.
struct StepDescription {
  std::string model, modes;  ///< `StepModel::text`
  std::vector<GraphDescription> graphs;
};

inline constexpr std::string_view step_format = "gradaccum step";

std::string name_of_graph(std::size_t number);
/// The file that its code is in.
std::string library_of_graph(std::size_t number, const GraphDescription& graph);

Manifest manifest_of(const StepDescription& step);
/// Believes nothing. `what`, a path say, begins the message of the `std::runtime_error` that it throws.
StepDescription step_description(const Manifest& manifest, const std::string& what);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/compilation/step_description.ipp>
#endif
