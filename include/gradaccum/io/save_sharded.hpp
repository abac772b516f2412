// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/io/safetensors.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace gradaccum::io {

/// What a tensor will be, before it is made.
struct PlannedTensor {
  std::string name = {};
  std::vector<std::int64_t> shape = {};
  at::ScalarType dtype = at::kFloat;
};

/// How large a file may be, and what it says of itself.
struct SaveShardedOptions {
  std::uint64_t shard_bytes = 5'000'000'000;  ///< the most of a file's tensors; a larger tensor has one of its own
  Metadata metadata = {{"format", "pt"}};     ///< of each file: what Hugging Face's libraries want
};

/// Writes tensors that need not be in memory together to a folder, as Hugging Face's `save_pretrained` does:
/// `model-00001-of-00003.safetensors` and so on, and `model.safetensors.index.json`; or `model.safetensors`, where one
/// file has room for all.
///
///     ga::io::save_sharded({{"a", {2, 3}}, {"b", {4}}}, "model/",
///                          [](auto& planned) { return torch::randn(planned.shape); }, {.shard_bytes = 24});
///     const ga::io::WeightFiles files("model");
///
/// A file takes as many tensors, in their order, as fit. `make` gives each of them once, file by file, in the order in
/// which a safetensors file has them: by dtype, then by name. Each is gone before the next is made.
///
/// The folder, which is made where it is not there, must have no weights yet. The index, or the one file, comes last
/// and by a rename: killed at any moment, the folder has all weights, or none that `WeightFiles` reads.
///
/// Throws `c10::Error` where two names are equal or a tensor is not as planned, and as `save_file` does.
///
/// @note Takes the memory of one tensor, beside what `make` takes. Waits for the device of tensors that are not
/// on the CPU.
void save_sharded(const std::vector<PlannedTensor>& tensors, const std::filesystem::path& folder,
                  const std::function<at::Tensor(const PlannedTensor&)>& make, const SaveShardedOptions& options = {});

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/save_sharded.ipp>
#endif
