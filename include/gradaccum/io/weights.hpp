// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/directory.hpp>
#include <gradaccum/detail/state/module_state.hpp>
#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/io/load_weights_options.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/io/weight_files.hpp>
#include <gradaccum/io/weights_report.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace gradaccum::io {

/// Loads a module's parameters and buffers, by their names, from a safetensors file, or from a folder as Hugging Face
/// has them: Python's `load_state_dict`, `from_pretrained`.
///
///     ga::io::save_weights(model, "weights.safetensors");
///     ga::io::load_weights(model, "weights.safetensors");
///     auto report = ga::io::load_weights(model, "weights.safetensors", {.strict = false});
///     if (!report.complete()) std::cerr << report;
///
/// A pretrained model that gets a new head:
///
///    ga::io::load_weights(model, "bloom-560m", {.base_model_prefix = "transformer", .may_be_missing = {"score"}});
///
/// `model` is a module, a `ModuleHolder`, or a pointer to a module; `path` is what `WeightFiles` takes. Its tensors
/// stay the same, with their devices, dtypes, strides and `requires_grad`: the file's numbers are copied into them, and
/// converted. Floating numbers do not go into integers, nor complex ones into real: such a weight is mis-shaped. A
/// weight that several names share is there if one of them is; where the file has several, the last by name counts.
///
/// Throws `c10::Error`, before anything is changed: if `strict`, for weights that are missing, unexpected or
/// mis-shaped, with their names; and always for one of the module's that cannot be copied into, as it is expanded or
/// has no memory, and for options that are not as they must be. Throws as `WeightFiles` does for files.
///
/// @note Takes no memory but for the headers, and for one tensor at a time of those that do not begin at a multiple of
/// their dtype's size. Synchronises with the device of weights that are not on the CPU.
template <detail::model Model>
WeightsReport load_weights(Model&& model, const std::filesystem::path& path, LoadWeightsOptions options = {});

/// Writes a module's parameters and buffers, by their names, to a safetensors file, which Python's `load_file` and
/// `load_weights` read.
///
///     ga::io::save_weights(model, "weights.safetensors");
///     ga::io::save_weights(model, "model/");  // to model/model.safetensors
///
/// In a folder it is `model.safetensors`, which Hugging Face's libraries look for. A path that ends in a slash is a
/// folder, and made where it is not there. A weight that several names share is written for each of them. `metadata` is
/// what Hugging Face's libraries want in a file of PyTorch's. The file is written, and errors are thrown, as by
/// `save_file`.
///
/// @note Synchronises with the device of weights that are not on the CPU, and takes the memory of one of them at a
/// time.
template <detail::model Model>
void save_weights(Model&& model, const std::filesystem::path& path, const Metadata& metadata = {{"format", "pt"}});

}  // namespace gradaccum::io

namespace gradaccum::detail {

/// What does not fit; empty if all does.
inline std::string misfit(const at::Tensor& loaded, const at::Tensor& weight) {
  if (loaded.sizes() != weight.sizes())
    return c10::str(loaded.sizes(), " in the file, ", weight.sizes(), " in the module");
  if (!c10::canCast(loaded.scalar_type(), weight.scalar_type()))
    return c10::str(loaded.scalar_type(), " in the file, ", weight.scalar_type(), " in the module");
  return "";
}

/// The copies to be made, and what cannot be.
struct WeightCopies {
  io::WeightsReport report = {};
  std::vector<std::pair<at::Tensor, std::string>> copies = {};  // to a weight, from the tensor of a name

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

inline io::WeightsReport load_weights(const torch::nn::Module& module, const std::filesystem::path& path,
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
  for (auto& [weight, name] : copies) weight.copy_(files.get_tensor(name));
  return report;
}

/// In a folder, which is made where a path that ends in a slash is not there.
inline std::filesystem::path file_for_weights(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!path.has_filename()) make_directory(path);
  return std::filesystem::is_directory(path, ignored) ? path / weights_name : path;
}

}  // namespace gradaccum::detail

template <gradaccum::detail::model Model>
gradaccum::io::WeightsReport gradaccum::io::load_weights(Model&& model, const std::filesystem::path& path,
                                                         LoadWeightsOptions options) {
  return detail::load_weights(detail::module_of(model), path, options);
}

template <gradaccum::detail::model Model>
void gradaccum::io::save_weights(Model&& model, const std::filesystem::path& path, const Metadata& metadata) {
  save_file(detail::tensors_of_module(detail::module_of(model)), detail::file_for_weights(path), metadata);
}
