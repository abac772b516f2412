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

/// The weights of a safetensors file, or of a folder as Hugging Face has them: `model.safetensors`, or the files that
/// `model.safetensors.index.json` lists.
///
///     ga::io::save_weights(model, "model/");
///     const ga::io::WeightFiles files("model");  // or a file, or an index
///     for (auto& name : files.keys()) std::cout << name << ": " << files.get_tensor(name).sizes() << "\n";
///
/// Tensors are read from the disk when they are used, as by `SafetensorsFile`. An index is checked before anything is
/// made of it: it must name files that lie beside it, and for each tensor the one that has it, which no other may. The
/// files themselves may be links, as those in Hugging Face's cache are.
///
/// Throws `std::runtime_error` with the file's name for files that are not as they must be, and for a folder that has
/// none of them; where it has a pickle (`pytorch_model.bin`), which is never read, with the line of Python that makes
/// a safetensors file of it.
///
/// @note Does not wait for the device. Takes the memory that `SafetensorsFile` does.
class WeightFiles {
 public:
  explicit WeightFiles(const std::filesystem::path& path);

  /// The names of the tensors, sorted.
  std::vector<std::string> keys() const;
  bool contains(const std::string& name) const { return files_.contains(name); }

  /// Names of tensors that are in the files, but not in the index, which is what counts.
  const std::vector<std::string>& unlisted() const { return unlisted_; }

  /// On the CPU. It may outlive this object.
  at::Tensor get_tensor(const std::string& name) const;

  /// See `SafetensorsFile`.
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
