// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/mapped_file.hpp>
#include <gradaccum/detail/io/weights_index.hpp>
#include <gradaccum/detail/io/weights_path.hpp>
#include <gradaccum/io/safetensors.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
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
/// @note Does not synchronise with the device. Takes the memory that `SafetensorsFile` does.
class WeightFiles {
 public:
  explicit WeightFiles(const std::filesystem::path& path);

  /// The names of the tensors, sorted.
  std::vector<std::string> keys() const {
    std::vector<std::string> names;
    for (auto& [name, file] : files_) names.push_back(name);
    return names;
  }
  bool contains(const std::string& name) const { return files_.contains(name); }

  /// Names of tensors that are in the files, but not in the index, which is what counts.
  const std::vector<std::string>& unlisted() const { return unlisted_; }

  /// On the CPU. It may outlive this object.
  at::Tensor get_tensor(const std::string& name) const {
    const auto found = files_.find(name);
    TORCH_CHECK(found != files_.end(), path_.string(), ": must have a tensor ", detail::in_quotes(name),
                ", but has none");
    return found->second->get_tensor(name);
  }

 private:
  using File = std::shared_ptr<const SafetensorsFile>;

  void open_listed();

  std::filesystem::path path_;
  std::map<std::string, File> files_;  // by the names of their tensors
  std::vector<std::string> unlisted_;
};

}  // namespace gradaccum::io

namespace gradaccum::detail {

inline WeightMap read_weights_index(const std::filesystem::path& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return WeightsIndexReader(path.string()).read({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace gradaccum::detail

inline gradaccum::io::WeightFiles::WeightFiles(const std::filesystem::path& path) : path_(detail::weights_path(path)) {
  if (path_.string().ends_with(".index.json")) {
    open_listed();
  } else {
    const auto file = std::make_shared<const SafetensorsFile>(path_);
    for (auto& name : file->keys()) files_.emplace(name, file);
  }
}

inline void gradaccum::io::WeightFiles::open_listed() {
  const auto fail = [this](const auto&... parts) {
    throw std::runtime_error(c10::str(path_.string(), ": ", parts...));
  };
  const auto index = detail::read_weights_index(path_);
  std::map<std::string, File> listed;
  for (auto& [name, file] : index) listed[file];
  for (auto& [file, opened] : listed) {
    const auto path = path_.parent_path() / file;
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) fail("lists ", file, ", which must be in its folder, and is not");
    opened = std::make_shared<const SafetensorsFile>(path);
    for (auto& name : opened->keys())
      if (const auto [other, is_new] = files_.emplace(name, opened); !is_new)
        fail("the tensor ", detail::in_quotes(name), " must be in one file, got it in ",
             other->second->path().filename().string(), " and in ", file);
  }
  for (auto& [name, file] : index)
    if (const auto found = files_.find(name); found == files_.end() || found->second != listed.at(file))
      fail("lists the tensor ", detail::in_quotes(name), " in ", file, ", which must have it, and has not");
  for (auto& [name, file] : files_)
    if (!index.contains(name)) unlisted_.push_back(name);
  for (auto& name : unlisted_) files_.erase(name);
}
