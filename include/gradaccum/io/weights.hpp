// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/types/module_of.hpp>
#include <gradaccum/io/load_weights_options.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/io/weight_files.hpp>
#include <gradaccum/io/weights_report.hpp>

#include <filesystem>

namespace gradaccum::detail {

io::WeightsReport load_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                               const io::LoadWeightsOptions& options);
void save_weights(const torch::nn::Module& module, const std::filesystem::path& path, const io::Metadata& metadata);

}  // namespace gradaccum::detail

namespace gradaccum::io {

/// Loads a module's parameters and buffers by name from a safetensors file or a folder in Hugging Face's layout, like
/// Python's `load_state_dict` and `from_pretrained`.
///
///     ga::io::save_weights(model, "weights.safetensors");
///     ga::io::load_weights(model, "weights.safetensors");
///     auto report = ga::io::load_weights(model, "weights.safetensors", {.strict = false});
///     if (!report.complete()) std::cerr << report;
///
/// A pretrained model with a new head:
///
///    ga::io::load_weights(model, "bloom-560m", {.base_model_prefix = "transformer", .may_be_missing = {"score"}});
///
/// `model` is a module, a `ModuleHolder`, or a pointer to a module; `path` is a path for `WeightFiles`. The module's
/// tensors keep their identity, device, dtype, strides and `requires_grad`: the file's values are converted and copied
/// into them. Floating point does not convert to integers, nor complex to real: such a weight is mis-shaped. A shared
/// weight with several names needs only one of them in the file; if the file has several, the last by name is used.
///
/// Throws `c10::Error` before anything has changed: if `strict`, for missing, unexpected or mis-shaped weights, with
/// their names; and always for a weight of the module that cannot be copied into, as it is expanded or has no memory,
/// and for invalid options. Throws like `WeightFiles` for files.
///
/// @note Takes memory only for the headers, and for one tensor at a time if it is not aligned to its dtype's size.
/// Waits for the device of weights that are not on the CPU.
template <detail::model Model>
WeightsReport load_weights(Model&& model, const std::filesystem::path& path, LoadWeightsOptions options = {}) {
  return detail::load_weights(detail::module_of(model), path, options);
}

/// Writes a module's parameters and buffers to a safetensors file for `load_weights` and Python's `load_file`.
///
///     ga::io::save_weights(model, "weights.safetensors");
///     ga::io::save_weights(model, "model/");  // to model/model.safetensors
///
/// In a folder the file is `model.safetensors`, where Hugging Face's libraries look for it. A path with a trailing
/// slash is a folder, which is created if it does not exist. A shared weight is written once for each of its names.
/// `metadata` defaults to what Hugging Face's libraries expect in a PyTorch file. Writes, and throws, like `save_file`.
///
/// @note Waits for the device of weights that are not on the CPU, and takes memory for one of them at a time.
template <detail::model Model>
void save_weights(Model&& model, const std::filesystem::path& path, const Metadata& metadata = {{"format", "pt"}}) {
  detail::save_weights(detail::module_of(model), path, metadata);
}

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/weights.ipp>
#endif
