// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: io

#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/io/safetensors.hpp>

#include <filesystem>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace gradaccum::io {

/// Permitted differences between a file of weights and a module.
struct LoadWeightsOptions {
  bool strict = true;  ///< throw if the file and the module differ; false: load all weights that fit

  /// Hugging Face's attribute of this name; "transformer" for BLOOM, where a model with a head has
  /// `transformer.ln_f.weight`, and the model without a head `ln_f.weight`. A weight that the file lacks is looked up
  /// with the prefix added or removed, unless the module has that name, too.
  std::string base_model_prefix = {};

  /// Weights that the file may lack, such as a new head's; the name of a module stands for all of its weights. If the
  /// file has them, they are loaded.
  std::vector<std::string> may_be_missing = {};
};

/// The weights of a safetensors file, or of a folder in Hugging Face's layout: `model.safetensors`, or the files listed
/// in `model.safetensors.index.json`.
///
///     ga::io::save_weights(model, "model/");
///     const ga::io::WeightFiles files("model");  // or a file, or an index
///     for (auto& name : files.keys()) std::cout << name << ": " << files.get_tensor(name).sizes() << "\n";
///
/// Tensors are read from the disk on first use, and take memory, as by `SafetensorsFile`. Validates an index first: it
/// must list files in its own folder, and for each tensor the only file that has it. Files may be links, as in Hugging
/// Face's cache. Throws `std::runtime_error` with the file's name for invalid files, and for a folder without weights.
/// A pickle (`pytorch_model.bin`) is never read; the message then has a line of Python that converts it.
///
/// @note Does not synchronize.
class WeightFiles {
 public:
  explicit WeightFiles(const std::filesystem::path& path);

  /// Returns the names of the tensors, sorted.
  std::vector<std::string> keys() const { return detail::keys_of(files_); }
  bool contains(const std::string& name) const { return files_.contains(name); }

  /// Returns the names of tensors that are in the files but not in the index. They are not loaded.
  const std::vector<std::string>& unlisted() const { return unlisted_; }

  /// Returns a tensor on the CPU, which may outlive this object.
  at::Tensor get_tensor(const std::string& name) const { return file_of(name).get_tensor(name); }

  /// Frees a tensor's memory; see `SafetensorsFile`.
  void release(const std::string& name) const { file_of(name).release(name); }

 private:
  using File = std::shared_ptr<const SafetensorsFile>;

  const SafetensorsFile& file_of(const std::string& name) const;

  std::filesystem::path path_;
  std::map<std::string, File> files_;  // by the names of their tensors
  std::vector<std::string> unlisted_;
};

/// The differences between a module and a file of weights.
struct WeightsReport {
  std::vector<std::string> missing = {};      ///< only in the module
  std::vector<std::string> unexpected = {};   ///< only in the file; if not listed, `weight (not in the index)`
  std::vector<std::string> mis_shaped = {};   ///< `weight: [2, 3] in the file, [3, 2] in the module`
  std::vector<std::string> new_weights = {};  ///< only in the module, as permitted; they keep their values

  /// Returns true if everything fits, apart from weights that may be missing.
  bool complete() const { return missing.empty() && unexpected.empty() && mis_shaped.empty(); }
};

std::ostream& operator<<(std::ostream& stream, const WeightsReport& report);

}  // namespace gradaccum::io

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
/// `model` is a module, a `ModuleHolder`, or a pointer to a module; `path` is a path for `WeightFiles`. The file's
/// values are converted and copied to the module's tensors, which otherwise do not change. Floating point does not
/// convert to integers, nor complex to real: such a weight is mis-shaped. A shared weight needs one of its names in the
/// file; of several, the last by name is used.
///
/// Throws before anything has changed: if `strict`, for missing, unexpected or mis-shaped weights, with their names;
/// always for invalid options or files, and for expanded weights of the module or weights without memory.
///
/// @note Takes memory for one tensor at a time. Synchronizes with the device of weights that are not on the CPU.
template <class Model>
WeightsReport load_weights(Model&& model, const std::filesystem::path& path, LoadWeightsOptions options = {}) {
  return detail::load_weights(detail::module_of(model), path, options);
}

/// Writes a module's parameters and buffers to a safetensors file for `load_weights` and Python's `load_file`.
///
///     ga::io::save_weights(model, "weights.safetensors");
///     ga::io::save_weights(model, "model/");  // to model/model.safetensors
///
/// A path with a trailing slash is a folder, which is created if it does not exist; the file in it is
/// `model.safetensors`, as in Hugging Face's layout. Hugging Face's libraries expect the default `metadata`. A shared
/// weight is written once per name. Throws, synchronizes and takes memory like `save_file`.
template <class Model>
void save_weights(Model&& model, const std::filesystem::path& path, const Metadata& metadata = {{"format", "pt"}}) {
  return detail::save_weights(detail::module_of(model), path, metadata);
}

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/io.ipp>
#endif
