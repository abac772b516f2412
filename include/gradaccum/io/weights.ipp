// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/weights.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/weights_index.hpp>
#include <gradaccum/detail/state/module_state.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Returns true if `name` is the weight or a module that contains it.
GRADACCUM_INLINE bool belongs_to(const std::string& weight, const std::string& name) {
  return weight == name || weight.starts_with(name + ".");
}

GRADACCUM_INLINE void check_options(const io::LoadWeightsOptions& options, const io::Tensors& weights) {
  TORCH_CHECK(!options.base_model_prefix.ends_with('.'),
              "LoadWeightsOptions: base_model_prefix must be given without the dot at its end, got '",
              options.base_model_prefix, "'");
  for (auto& name : options.may_be_missing)
    TORCH_CHECK(std::ranges::any_of(weights, [&](auto& weight) { return belongs_to(weight.first, name); }),
                "LoadWeightsOptions: may_be_missing must have names of the module's weights or modules, got '", name,
                "'");
}

/// Describes a mismatch of shape or dtype; empty if the tensor fits.
GRADACCUM_INLINE std::string misfit(const at::Tensor& loaded, const at::Tensor& weight) {
  if (loaded.sizes() != weight.sizes())
    return c10::str(loaded.sizes(), " in the file, ", weight.sizes(), " in the module");
  if (!c10::canCast(loaded.scalar_type(), weight.scalar_type()))
    return c10::str(loaded.scalar_type(), " in the file, ", weight.scalar_type(), " in the module");
  return "";
}

/// The copies to make, and a report of the rest.
struct WeightCopies {
  io::WeightsReport report = {};
  std::vector<std::pair<at::Tensor, std::string>> copies = {};  // a weight of the module, and the file's name for it

  WeightCopies(const io::Tensors& weights, const io::WeightFiles& files, const io::LoadWeightsOptions& options) {
    std::set<const void*> found;
    std::set<std::string> used;
    for (auto& [name, weight] : weights) {
      const auto name_there = name_in(files, name, weights, options.base_model_prefix);
      if (!files.contains(name_there)) continue;
      found.insert(weight.unsafeGetTensorImpl());
      used.insert(name_there);
      check_can_be_loaded(name, weight);
      if (const auto problem = misfit(files.get_tensor(name_there), weight); problem.empty())
        copies.emplace_back(weight, name_there);
      else
        report.mis_shaped.push_back(name + ": " + problem);
    }
    for (auto& [name, weight] : weights)
      if (!found.contains(weight.unsafeGetTensorImpl()))
        (may_be_missing(name, options) ? report.new_weights : report.missing).push_back(name);
    for (auto& name : files.keys())
      if (!used.contains(name)) report.unexpected.push_back(name);
    for (auto& name : files.unlisted()) report.unexpected.push_back(name + " (not in the index)");
  }

 private:
  static std::string name_in(const io::WeightFiles& files, const std::string& name, const io::Tensors& weights,
                             const std::string& prefix) {
    if (prefix.empty() || files.contains(name)) return name;
    const auto dotted = prefix + ".";
    const auto other = name.starts_with(dotted) ? name.substr(dotted.size()) : dotted + name;
    return weights.contains(other) ? name : other;
  }
  static bool may_be_missing(const std::string& name, const io::LoadWeightsOptions& options) {
    return std::ranges::any_of(options.may_be_missing, [&](auto& part) { return belongs_to(name, part); });
  }
};

GRADACCUM_INLINE io::WeightsReport load_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                                                const io::LoadWeightsOptions& options) {
  const auto weights = tensors_of_module(module);
  check_options(options, weights);
  const io::WeightFiles files(path);
  auto [report, copies] = WeightCopies(weights, files, options);
  TORCH_CHECK(!options.strict || report.complete(), "load_weights: ", path.string(),
              " must have the weights of the module, and no others; {.strict = false} loads those that fit, "
              ".base_model_prefix and .may_be_missing say what may differ. Got ",
              report);
  const at::NoGradGuard no_grad;
  for (auto& [weight, name] : copies) {
    weight.copy_(files.get_tensor(name));
    files.release(name);  // otherwise the module would be in memory twice at the end
  }
  return report;
}

/// Returns the file for a path, which may be a folder; creates the folder if the path ends in a slash.
GRADACCUM_INLINE std::filesystem::path file_for_weights(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!path.has_filename()) make_directory(path);
  return std::filesystem::is_directory(path, ignored) ? path / weights_name : path;
}

GRADACCUM_INLINE void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                                   const io::Metadata& metadata) {
  io::save_file(tensors_of_module(module), file_for_weights(path), metadata);
}

}  // namespace gradaccum::detail
