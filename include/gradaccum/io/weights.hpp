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
/// their dtype's size. Waits for the device of weights that are not on the CPU.
template <detail::model Model>
WeightsReport load_weights(Model&& model, const std::filesystem::path& path, LoadWeightsOptions options = {}) {
  return detail::load_weights(detail::module_of(model), path, options);
}

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
/// @note Waits for the device of weights that are not on the CPU, and takes the memory of one of them at a
/// time.
template <detail::model Model>
void save_weights(Model&& model, const std::filesystem::path& path, const Metadata& metadata = {{"format", "pt"}}) {
  detail::save_weights(detail::module_of(model), path, metadata);
}

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/weights.ipp>
#endif
