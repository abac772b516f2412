// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: io

#include <gradaccum/io/safetensors.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace gradaccum::io {

/// The description of a tensor that `save_sharded` requests later.
struct PlannedTensor {
  std::string name = {};
  std::vector<std::int64_t> shape = {};
  at::ScalarType dtype = at::kFloat;
};

/// Options of `save_sharded`.
struct SaveShardedOptions {
  std::uint64_t shard_bytes = 5'000'000'000;  ///< the limit for a file's tensors; a larger tensor gets its own file
  Metadata metadata = {{"format", "pt"}};     ///< for each file; Hugging Face's libraries expect the default
};

/// Writes tensors, which need not fit into memory together, to a folder like Hugging Face's `save_pretrained`:
/// `model-00001-of-00003.safetensors`, … and `model.safetensors.index.json`, or `model.safetensors` if one file
/// suffices.
///
///     ga::io::save_sharded({{"a", {2, 3}}, {"b", {4}}}, "model/",
///                          [](auto& planned) { return torch::randn(planned.shape); }, {.shard_bytes = 24});
///     const ga::io::WeightFiles files("model");
///
/// Each file has as many consecutive tensors as fit. `make` is called once per tensor, file by file, in the order of a
/// safetensors file: by dtype, then by name. Each tensor is released before the next is made. The folder is created if
/// it does not exist, and must not have weights yet. The index, or the only file, gets its name last: after a kill the
/// folder has all weights, or none that `WeightFiles` reads.
///
/// Throws `c10::Error` if two names are equal or a tensor is not as planned, and the same errors as `save_file`.
///
/// @note Takes memory for one tensor in addition to `make`. Synchronizes with the device of tensors that are not on the
/// CPU.
void save_sharded(const std::vector<PlannedTensor>& tensors, const std::filesystem::path& folder,
                  const std::function<at::Tensor(const PlannedTensor&)>& make, const SaveShardedOptions& options = {});

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/io.ipp>
#endif
