// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/compilation/step_description.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/version.hpp>

#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <cmath>
#include <stdexcept>

namespace gradaccum::detail {

/// Calls `visit(name, member)` for each member of a graph, by its name in a manifest. `Graph` may be const.
template <class Graph>
void for_each_member(Graph& graph, auto&& visit) {
  visit("batch", graph.batch);
  visit("any_rows", graph.any_rows);
  visit("items", graph.items);
  visit("output", graph.output);
  visit("target", graph.target);
  visit("trace", graph.trace);
  visit("code", graph.code);
  visit("gradients", graph.gradients);
  visit("moved", graph.moved);
  visit("capability", graph.capability);
}

GRADACCUM_INLINE std::string name_of_graph(std::size_t number) { return "graph-" + std::to_string(number); }

GRADACCUM_INLINE std::string library_of_graph(std::size_t number, const GraphDescription& graph) {
  return name_of_graph(number) + "." + graph.code + ".so";
}

GRADACCUM_INLINE Manifest manifest_of(const StepDescription& step) {
  Manifest manifest;
  manifest.format = step_format;
  manifest.gradaccum = c10::str(GRADACCUM_VERSION_MAJOR, ".", GRADACCUM_VERSION_MINOR, ".", GRADACCUM_VERSION_PATCH);
  manifest.libtorch = TORCH_VERSION;
  manifest.values["model"] = step.model;
  manifest.values["modes"] = step.modes;
  manifest.values["graphs"] = static_cast<std::int64_t>(step.graphs.size());
  for (std::size_t i = 0; i < step.graphs.size(); ++i)
    for_each_member(step.graphs[i], [&](const std::string& name, const auto& value) {
      manifest.values[name_of_graph(i) + "." + name] = value;
    });
  return manifest;
}

/// Reads the values of a manifest by name and type.
class StepReader {
 public:
  StepReader(const Manifest& manifest, const std::string& what) : manifest_(manifest), what_(what) {}

  template <class Value>
  Value value(const std::string& name) const {
    const auto found = manifest_.values.find(name);
    if (found == manifest_.values.end()) fail("must have a value " + in_quotes(name));
    const auto* const value = std::get_if<Value>(&found->second);
    if (!value) fail("the value " + in_quotes(name) + " must be of another type");
    return *value;
  }

  GraphDescription graph(const std::string& graph_name) const {
    GraphDescription graph;
    for_each_member(graph, [&]<class Value>(const std::string& name, Value& member) {
      member = value<Value>(graph_name + "." + name);
    });
    if (!graph.code.empty() && graph.code.find_first_not_of("0123456789abcdef") != std::string::npos)
      fail("the code of " + graph_name + " must be a name of digits 0-9 a-f, got " + in_quotes(graph.code));
    if (!(std::isfinite(graph.items) && graph.items >= 0)) fail("the items of " + graph_name + " must be >= 0");
    return graph;
  }

  [[noreturn]] void fail(const std::string& requirement) const { throw std::runtime_error(what_ + ": " + requirement); }

 private:
  const Manifest& manifest_;
  const std::string& what_;
};

GRADACCUM_INLINE StepDescription step_description(const Manifest& manifest, const std::string& what) {
  const StepReader reader(manifest, what);
  StepDescription step;
  step.model = reader.value<std::string>("model");
  step.modes = reader.value<std::string>("modes");
  const auto graphs = reader.value<std::int64_t>("graphs");
  if (graphs < 1 || static_cast<std::size_t>(graphs) > manifest.values.size())
    reader.fail("the number of graphs must fit its values, got " + std::to_string(graphs));
  for (std::int64_t i = 0; i < graphs; ++i)
    step.graphs.push_back(reader.graph(name_of_graph(static_cast<std::size_t>(i))));
  return step;
}

}  // namespace gradaccum::detail
