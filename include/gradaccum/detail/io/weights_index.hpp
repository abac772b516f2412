// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// Hugging Face's names for a model's weights: a single file, or an index that lists several.
inline constexpr const char* weights_name = "model.safetensors";
inline constexpr const char* weights_index_name = "model.safetensors.index.json";

/// Returns the file or index that `path`, itself or as its folder, refers to.
std::filesystem::path weights_path(const std::filesystem::path& path);

/// The file that holds each tensor, by the tensor's name.
using WeightMap = std::map<std::string, std::string>;

/// Reads an untrusted index. Throws `std::runtime_error`; messages begin with `what`, for example a path.
WeightMap read_weights_index(std::string_view text, const std::string& what);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/weights_index.ipp>
#endif
