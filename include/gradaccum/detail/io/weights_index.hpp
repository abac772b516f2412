// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace gradaccum::detail {

/// Where Hugging Face has a model's weights: in a file of this name, or in files that an index lists.
inline constexpr const char* weights_name = "model.safetensors";
inline constexpr const char* weights_index_name = "model.safetensors.index.json";

/// The file or index that is meant by its path, or by that of its folder.
std::filesystem::path weights_path(const std::filesystem::path& path);

/// The file in which each tensor is, by the tensor's name.
using WeightMap = std::map<std::string, std::string>;

/// Reads an index, and trusts nothing in it. `what`, a path say, begins the messages of the `std::runtime_error` that
/// it throws.
WeightMap read_weights_index(std::string_view text, const std::string& what);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/io/weights_index.ipp>
#endif
