// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/module_of.hpp>
#include <gradaccum/detail/module_state.hpp>
#include <gradaccum/io/safetensors.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::io {

struct LoadWeightsOptions {
  bool strict = true;  ///< throw where the file and the module differ; else load what fits
};

/// What a module and a file of weights do not have in common.
struct WeightsReport {
  std::vector<std::string> missing = {};     ///< in the module only
  std::vector<std::string> unexpected = {};  ///< in the file only
  std::vector<std::string> mis_shaped = {};  ///< `weight: [2, 3] in the file, [3, 2] in the module`

  bool complete() const { return missing.empty() && unexpected.empty() && mis_shaped.empty(); }

  friend std::ostream& operator<<(std::ostream& stream, const WeightsReport& report) {
    if (report.complete()) return stream << "all weights fit";
    print(stream, "missing", report.missing);
    print(stream, "unexpected", report.unexpected);
    print(stream, "mis-shaped", report.mis_shaped);
    return stream;
  }

 private:
  static void print(std::ostream& stream, const char* heading, const std::vector<std::string>& lines) {
    constexpr std::size_t shown = 10;
    if (lines.empty()) return;
    stream << heading << " (" << lines.size() << "):";
    for (std::size_t i = 0; i < std::min(lines.size(), shown); ++i) stream << "\n  " << lines[i];
    if (lines.size() > shown) stream << "\n  and " << lines.size() - shown << " more";
    stream << "\n";
  }
};

/// Loads a module's parameters and buffers, by their names, from a safetensors file: Python's `load_state_dict`.
///
///     ga::io::save_weights(model, "weights.safetensors");
///     ga::io::load_weights(model, "weights.safetensors");
///     auto report = ga::io::load_weights(model, "weights.safetensors", {.strict = false});
///     if (!report.complete()) std::cerr << report;
///
/// `model` is a module, a `ModuleHolder`, or a pointer to a module. Its tensors stay the same, with their devices,
/// dtypes, strides and `requires_grad`: the file's numbers are copied into them, and converted. Floating numbers do not
/// go into integers, nor complex ones into real: such a weight is mis-shaped. A weight that several names share is
/// there if one of them is; where the file has several, the last by name counts.
///
/// Throws `c10::Error`, before anything is changed: if `strict`, for weights that are missing, unexpected or
/// mis-shaped, with their names; and always for one of the module's that cannot be copied into, as it is expanded or
/// has no memory. Throws as `SafetensorsFile` does for the file.
///
/// @note Takes no memory but for the header. Synchronises with the device of weights that are not on the CPU.
template <detail::model Model>
WeightsReport load_weights(Model&& model, const std::filesystem::path& path, LoadWeightsOptions options = {});

/// Writes a module's parameters and buffers, by their names, to a safetensors file, which Python's `load_file` and
/// `load_weights` read.
///
///     ga::io::save_weights(model, "weights.safetensors");
///
/// A weight that several names share is written for each of them. `metadata` is what Hugging Face's libraries want in a
/// file of PyTorch's. The file is written, and errors are thrown, as by `save_file`.
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
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // to, from

  WeightCopies(const torch::nn::Module& module, const io::SafetensorsFile& file) {
    const auto weights = tensors_of_module(module);
    std::set<const void*> found;
    for (auto& [name, weight] : weights) {
      if (!file.contains(name)) continue;
      found.insert(weight.unsafeGetTensorImpl());
      check_can_be_loaded(name, weight);
      auto loaded = file.get_tensor(name);
      if (const auto problem = misfit(loaded, weight); problem.empty())
        copies.emplace_back(weight, std::move(loaded));
      else
        report.mis_shaped.push_back(name + ": " + problem);
    }
    for (auto& [name, weight] : weights)
      if (!found.contains(weight.unsafeGetTensorImpl())) report.missing.push_back(name);
    for (auto& name : file.keys())
      if (!weights.contains(name)) report.unexpected.push_back(name);
  }
};

inline io::WeightsReport load_weights(const torch::nn::Module& module, const std::filesystem::path& path, bool strict) {
  const io::SafetensorsFile file(path);
  auto [report, copies] = WeightCopies(module, file);
  TORCH_CHECK(!strict || report.complete(), "load_weights: ", path.string(),
              " must have the weights of the module, and no others; {.strict = false} loads those that fit. Got ",
              report);
  const at::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
  return report;
}

}  // namespace gradaccum::detail

template <gradaccum::detail::model Model>
gradaccum::io::WeightsReport gradaccum::io::load_weights(Model&& model, const std::filesystem::path& path,
                                                         LoadWeightsOptions options) {
  return detail::load_weights(detail::module_of(model), path, options.strict);
}

template <gradaccum::detail::model Model>
void gradaccum::io::save_weights(Model&& model, const std::filesystem::path& path, const Metadata& metadata) {
  save_file(detail::tensors_of_module(detail::module_of(model)), path, metadata);
}
