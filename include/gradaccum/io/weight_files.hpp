// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/safetensors.hpp>

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace gradaccum::io {

/// The weights of a safetensors file, or of a folder in Hugging Face's layout: `model.safetensors`, or the files listed
/// in `model.safetensors.index.json`.
///
///     ga::io::save_weights(model, "model/");
///     const ga::io::WeightFiles files("model");  // or a file, or an index
///     for (auto& name : files.keys()) std::cout << name << ": " << files.get_tensor(name).sizes() << "\n";
///
/// Tensors are read from the disk on first use, as by `SafetensorsFile`. An index is validated first: it must list
/// files in its own folder, and for each tensor the only file that has it. Files may be links, as in Hugging Face's
/// cache.
///
/// Throws `std::runtime_error` with the file's name for invalid files, and for a folder without weights. A pickle
/// (`pytorch_model.bin`) is never read; the message then has a line of Python that converts it.
///
/// @note Does not wait for the device. Takes as much memory as `SafetensorsFile`.
class WeightFiles {
 public:
  explicit WeightFiles(const std::filesystem::path& path);

  /// Returns the names of the tensors, sorted.
  std::vector<std::string> keys() const;
  bool contains(const std::string& name) const { return files_.contains(name); }

  /// The names of tensors that are in the files but not in the index. They are not loaded.
  const std::vector<std::string>& unlisted() const { return unlisted_; }

  /// Returns a tensor on the CPU, which may outlive this object.
  at::Tensor get_tensor(const std::string& name) const;

  /// Frees a tensor's memory; see `SafetensorsFile`.
  void release(const std::string& name) const;

 private:
  using File = std::shared_ptr<const SafetensorsFile>;

  const SafetensorsFile& file_of(const std::string& name) const;

  void open_listed();

  std::filesystem::path path_;
  std::map<std::string, File> files_;  // by the names of their tensors
  std::vector<std::string> unlisted_;
};

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/weight_files.ipp>
#endif
