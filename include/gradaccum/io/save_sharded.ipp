// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/save_sharded.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/io/safetensors_tensors.hpp>
#include <gradaccum/detail/io/weights_index.hpp>

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace gradaccum::detail {

/// The tensors of each file.
using PlannedFiles = std::vector<std::map<std::string, io::PlannedTensor>>;

GRADACCUM_INLINE PlannedFiles divide_into_shards(const std::vector<io::PlannedTensor>& tensors,
                                                 std::uint64_t most_bytes) {
  TORCH_CHECK(most_bytes > 0, "SaveShardedOptions: shard_bytes must be > 0, got 0");
  PlannedFiles shards(1);
  std::map<std::string, io::PlannedTensor> all;
  std::uint64_t bytes = 0;
  for (auto& tensor : tensors) {
    TORCH_CHECK(all.emplace(tensor.name, tensor).second, "save_sharded: each name must be there once, got ",
                in_quotes(tensor.name), " twice");
    const auto size = planned_entry(tensor.name, tensor.dtype, tensor.shape).end;
    if (!shards.back().empty() && (size > most_bytes || bytes > most_bytes - size)) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += size;
    shards.back().emplace(tensor.name, tensor);
  }
  return shards;
}

GRADACCUM_INLINE std::string shard_name(std::size_t number, std::size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", number, count);
  return count == 1 ? weights_name : name;
}

GRADACCUM_INLINE void save_shard(const std::map<std::string, io::PlannedTensor>& tensors,
                                 const std::filesystem::path& path,
                                 const std::function<at::Tensor(const io::PlannedTensor&)>& make,
                                 const io::Metadata& metadata) {
  std::vector<NamedSafetensorsEntry> entries;
  for (auto& [name, tensor] : tensors) entries.emplace_back(name, planned_entry(name, tensor.dtype, tensor.shape));
  const auto made = [&](const std::string& name) {
    auto& planned = tensors.at(name);
    auto tensor = make(planned);
    TORCH_CHECK(tensor.defined() && tensor.scalar_type() == planned.dtype && tensor.sizes() == planned.shape,
                "save_sharded: the tensor ", in_quotes(name), " must be as planned, ", planned.dtype, " ",
                at::IntArrayRef(planned.shape), ", got ",
                tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes()) : "none");
    return tensor;
  };
  replace_file(path, [&](OutputFile& file) {
    write_safetensors([&](auto* data, auto size) { file.write(data, size); }, std::move(entries), made, metadata);
  });
}

/// Writes the index like Python's json.dumps with sorted keys and an indent of 2.
GRADACCUM_INLINE std::string weights_index(const PlannedFiles& shards) {
  std::map<std::string, std::string> files;
  std::uint64_t bytes = 0, numbers = 0;
  for (std::size_t i = 0; i < shards.size(); ++i)
    for (auto& [name, tensor] : shards[i]) {
      const auto size = planned_entry(name, tensor.dtype, tensor.shape).end;
      bytes += size;
      numbers += size / c10::elementSize(tensor.dtype);
      files.emplace(name, shard_name(i + 1, shards.size()));
    }
  auto text = "{\n  \"metadata\": {\n    \"total_parameters\": " + std::to_string(numbers) +
              ",\n    \"total_size\": " + std::to_string(bytes) + "\n  },\n  \"weight_map\": {";
  const auto* separator = "\n    ";
  for (auto& [name, file] : files) {
    text += separator + json_of(name).value() + ": \"" + file + "\"";
    separator = ",\n    ";
  }
  return text + "\n  }\n}\n";
}

GRADACCUM_INLINE void require_no_weights(const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const auto* name : {weights_name, weights_index_name})
    if (std::filesystem::exists(std::filesystem::symlink_status(folder / name, ignored)))
      throw std::runtime_error((folder / name).string() +
                               ": must not be there yet: save_sharded writes to a folder without weights");
}

}  // namespace gradaccum::detail

namespace gradaccum::io {

GRADACCUM_INLINE void save_sharded(const std::vector<PlannedTensor>& tensors, const std::filesystem::path& folder,
                                   const std::function<at::Tensor(const PlannedTensor&)>& make,
                                   const SaveShardedOptions& options) {
  const auto shards = detail::divide_into_shards(tensors, options.shard_bytes);
  detail::make_directory(folder);
  detail::require_no_weights(folder);
  for (std::size_t i = 0; i < shards.size(); ++i)
    detail::save_shard(shards[i], folder / detail::shard_name(i + 1, shards.size()), make, options.metadata);
  if (shards.size() == 1) return;
  const auto index = detail::weights_index(shards);
  detail::replace_file(folder / detail::weights_index_name,
                       [&](detail::OutputFile& file) { file.write(index.data(), index.size()); });
}

}  // namespace gradaccum::io
