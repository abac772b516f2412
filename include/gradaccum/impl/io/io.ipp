// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/save_sharded.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/io/weights.hpp>

#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/safetensors_header.hpp>
#include <gradaccum/detail/io/safetensors_tensors.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <ostream>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Tensors grouped by file.
struct FilesOfState {
  std::map<std::string, io::Tensors> tensors;
  Manifest manifest;
  std::string undefined = {};  // names of undefined tensors, one per line

  explicit FilesOfState(const Archive::Values& values) {
    for (auto& value : values) std::visit([&](auto& held) { add(value.first, held); }, value.second);
    if (!undefined.empty()) manifest.values[undefined_name] = undefined;
  }

  static constexpr const char* undefined_name = "undefined tensors";

  /// Splits a name: `model.0.weight` is `0.weight` in model.safetensors.
  static std::pair<std::string, std::string> file_and_key(const std::string& name) {
    const auto dot = name.find('.');
    return dot == name.npos ? std::pair(std::string("state"), name)
                            : std::pair(name.substr(0, dot), name.substr(dot + 1));
  }

 private:
  void add(const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      undefined += name + "\n";
      return;
    }
    const auto [file, key] = file_and_key(name);
    TORCH_CHECK(file != "state" || name == key, "Archive: no part may be named 'state', got the value '", name, "'");
    TORCH_CHECK(is_file_name(file),
                "Archive: a part with tensors must have a name that a file can have (A-Z a-z 0-9 _ -), got '", file,
                "'");
    tensors[file].emplace(key, tensor);
  }
  template <class Number>
  void add(const std::string& name, const Number& value) {
    manifest.values[name] = value;
  }
};

GRADACCUM_INLINE void check_can_be_written(const Archive& archive) { FilesOfState{archive.values()}; }

inline constexpr const char* tensors_suffix = ".safetensors";

inline constexpr std::size_t piece_of_tensor = std::size_t{4} << 20;  // bytes that a thread reads at a time

GRADACCUM_INLINE std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

/// Reads each tensor once, into its own memory, and checks the file against the manifest's checksum.
GRADACCUM_INLINE io::Tensors read_listed_tensors(const std::filesystem::path& path, const Manifest::File& listed) {
  const auto what = path.string();
  const SafetensorsHeaderReader reader(what);
  ListedFile file(path, listed);
  std::string text(static_cast<std::size_t>(std::min<std::uint64_t>(listed.bytes, 8)), '\0');
  file.read(text.data(), text.size());
  text.resize(static_cast<std::size_t>(reader.size_of_header(text, listed.bytes)));
  file.read(text.data(), text.size());
  const auto header = reader.read(text, file.left());

  io::Tensors tensors;
  std::map<std::uint64_t, std::span<std::byte>> in_order;  // in file order; empty tensors are not included
  for (auto& [name, entry] : header.tensors) {
    const auto& tensor = tensors[name] = at::empty(entry.shape, dtype_in_file(what, name, entry.dtype));
    if (tensor.nbytes() > 0) in_order[entry.begin] = bytes_of(tensor);
  }
  std::vector<std::span<std::byte>> pieces;
  for (auto& [begin, bytes] : in_order)
    for (auto left = bytes; !left.empty(); left = left.subspan(pieces.back().size()))
      pieces.push_back(left.first(std::min(left.size(), piece_of_tensor)));
  file.read(pieces, [](std::size_t count, const std::function<void(std::size_t)>& body) {
    parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t i) { body(static_cast<std::size_t>(i)); });
  });
  file.check();
  for (auto& [name, tensor] : tensors) check_flags(what, name, tensor.scalar_type(), bytes_of(tensor));
  return tensors;
}

/// Checks the file, and maps the tensors, which take no memory and are read from the file a second time on use.
GRADACCUM_INLINE io::Tensors map_listed_tensors(const std::filesystem::path& path, const Manifest::File& listed) {
  check_file(path, listed);
  const io::SafetensorsFile file(path);
  io::Tensors tensors;
  for (auto& name : file.keys()) tensors[name] = file.get_tensor(name);
  return tensors;
}

GRADACCUM_INLINE StateFiles write_tensors(const Archive& archive, const std::filesystem::path& folder) {
  StateFiles files;
  for (auto& [name, tensors] : FilesOfState(archive.values()).tensors) {
    OutputFile file(folder / (name + tensors_suffix));
    write_safetensors([&](auto* data, auto size) { file.write(data, size); }, tensors, {{"format", "pt"}});
    file.close();
    files[name + tensors_suffix] = {file.bytes(), file.crc32()};
  }
  return files;
}

GRADACCUM_INLINE void write_manifest_of(const Archive& archive, const StateFiles& files,
                                        const std::filesystem::path& folder) {
  auto manifest = FilesOfState(archive.values()).manifest;
  manifest.files = files;
  manifest.gradaccum = c10::str(GRADACCUM_VERSION_MAJOR, ".", GRADACCUM_VERSION_MINOR, ".", GRADACCUM_VERSION_PATCH);
  manifest.libtorch = TORCH_VERSION;
  write_manifest(folder, manifest);
}

GRADACCUM_INLINE Archive::Values read_state(const std::filesystem::path& folder,
                                            io::Tensors (*tensors_of)(const std::filesystem::path& file,
                                                                      const Manifest::File& listed)) {
  const auto manifest = read_manifest(folder);
  check_no_others(folder, manifest);
  Archive::Values values;
  for (auto& value : manifest.values) std::visit([&](auto& held) { values[value.first] = held; }, value.second);
  if (const auto undefined = values.extract(FilesOfState::undefined_name)) {
    const auto* const names = std::get_if<std::string>(&undefined.mapped());
    TORCH_CHECK(names, folder.string(), ": the names of undefined tensors must be a text");
    std::istringstream lines(*names);
    for (std::string name; std::getline(lines, name);) values[name] = at::Tensor();
  }
  for (auto& [name, listed] : manifest.files) {
    const auto path = folder / name;
    const auto part = path.stem().string();
    for (auto& [key, tensor] : tensors_of(path, listed)) {
      const auto full = part == "state" ? key : part + "." + key;
      const bool is_new = values.emplace(full, tensor).second;
      TORCH_CHECK(is_new, path.string(), ": a value '", full, "' is there twice");
    }
  }
  return values;
}

GRADACCUM_INLINE Archive::Values map_state(const std::filesystem::path& folder) {
  return read_state(folder, map_listed_tensors);
}

}  // namespace gradaccum::detail

GRADACCUM_INLINE void gradaccum::io::write_state(const Archive& archive, const std::filesystem::path& folder) {
  detail::write_manifest_of(archive, detail::write_tensors(archive, folder), folder);
}

GRADACCUM_INLINE gradaccum::Archive::Values gradaccum::io::read_state(const std::filesystem::path& folder) {
  return detail::read_state(folder, detail::read_listed_tensors);
}

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

GRADACCUM_INLINE WeightFiles::WeightFiles(const std::filesystem::path& path) : path_(detail::weights_path(path)) {
  if (path_.string().ends_with(".index.json")) {
    open_listed();
  } else {
    const auto file = std::make_shared<const SafetensorsFile>(path_);
    for (auto& name : file->keys()) files_.emplace(name, file);
  }
}

GRADACCUM_INLINE void WeightFiles::open_listed() {
  const auto fail = [this](const auto&... parts) {
    throw std::runtime_error(c10::str(path_.string(), ": ", parts...));
  };
  const auto index = detail::read_weights_index(detail::MappedFile(path_).text(), path_.string());
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

GRADACCUM_INLINE std::vector<std::string> WeightFiles::keys() const {
  std::vector<std::string> names;
  for (auto& [name, file] : files_) names.push_back(name);
  return names;
}

GRADACCUM_INLINE const SafetensorsFile& WeightFiles::file_of(const std::string& name) const {
  const auto found = files_.find(name);
  TORCH_CHECK(found != files_.end(), path_.string(), ": must have a tensor ", detail::in_quotes(name),
              ", but has none");
  return *found->second;
}

GRADACCUM_INLINE at::Tensor WeightFiles::get_tensor(const std::string& name) const {
  return file_of(name).get_tensor(name);
}

GRADACCUM_INLINE void WeightFiles::release(const std::string& name) const { file_of(name).release(name); }

}  // namespace gradaccum::io

namespace gradaccum::detail {

GRADACCUM_INLINE void print_weights(std::ostream& stream, const char* heading, const std::vector<std::string>& lines) {
  constexpr std::size_t shown = 10;
  if (lines.empty()) return;
  stream << heading << " (" << lines.size() << "):";
  for (std::size_t i = 0; i < std::min(lines.size(), shown); ++i) stream << "\n  " << lines[i];
  if (lines.size() > shown) stream << "\n  and " << lines.size() - shown << " more";
  stream << "\n";
}

}  // namespace gradaccum::detail

namespace gradaccum::io {

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const WeightsReport& report) {
  if (report.complete() && report.new_weights.empty()) return stream << "all weights fit";
  detail::print_weights(stream, "missing", report.missing);
  detail::print_weights(stream, "unexpected", report.unexpected);
  detail::print_weights(stream, "mis-shaped", report.mis_shaped);
  detail::print_weights(stream, "new", report.new_weights);
  return stream;
}

}  // namespace gradaccum::io

namespace gradaccum::detail {

/// Returns true if `name` is the weight or a module that contains it.
GRADACCUM_INLINE bool belongs_to(const std::string& weight, const std::string& name) {
  return weight == name || weight.starts_with(name + ".");
}

GRADACCUM_INLINE void check_options(const io::LoadWeightsOptions& options, const io::Tensors& weights) {
  TORCH_CHECK(!options.base_model_prefix.ends_with('.'),
              "LoadWeightsOptions: base_model_prefix must be given without the dot at its end, got '",
              options.base_model_prefix, "'");
  for (auto& name : options.may_be_missing)
    TORCH_CHECK(std::ranges::any_of(weights, [&](auto& weight) { return belongs_to(weight.first, name); }),
                "LoadWeightsOptions: may_be_missing must have names of the module's weights or modules, got '", name,
                "'");
}

/// Describes a mismatch of shape or dtype; empty if the tensor fits.
GRADACCUM_INLINE std::string misfit(const at::Tensor& loaded, const at::Tensor& weight) {
  if (loaded.sizes() != weight.sizes())
    return c10::str(loaded.sizes(), " in the file, ", weight.sizes(), " in the module");
  if (!c10::canCast(loaded.scalar_type(), weight.scalar_type()))
    return c10::str(loaded.scalar_type(), " in the file, ", weight.scalar_type(), " in the module");
  return "";
}

/// The copies to make, and a report of the rest.
struct WeightCopies {
  io::WeightsReport report = {};
  std::vector<std::pair<at::Tensor, std::string>> copies = {};  // a weight of the module, and the file's name for it

  WeightCopies(const io::Tensors& weights, const io::WeightFiles& files, const io::LoadWeightsOptions& options) {
    std::set<const void*> found;
    std::set<std::string> used;
    for (auto& [name, weight] : weights) {
      const auto name_there = name_in(files, name, weights, options.base_model_prefix);
      if (!files.contains(name_there)) continue;
      found.insert(weight.unsafeGetTensorImpl());
      used.insert(name_there);
      check_can_be_loaded(name, weight);
      if (const auto problem = misfit(files.get_tensor(name_there), weight); problem.empty())
        copies.emplace_back(weight, name_there);
      else
        report.mis_shaped.push_back(name + ": " + problem);
    }
    for (auto& [name, weight] : weights)
      if (!found.contains(weight.unsafeGetTensorImpl()))
        (may_be_missing(name, options) ? report.new_weights : report.missing).push_back(name);
    for (auto& name : files.keys())
      if (!used.contains(name)) report.unexpected.push_back(name);
    for (auto& name : files.unlisted()) report.unexpected.push_back(name + " (not in the index)");
  }

 private:
  static std::string name_in(const io::WeightFiles& files, const std::string& name, const io::Tensors& weights,
                             const std::string& prefix) {
    if (prefix.empty() || files.contains(name)) return name;
    const auto dotted = prefix + ".";
    const auto other = name.starts_with(dotted) ? name.substr(dotted.size()) : dotted + name;
    return weights.contains(other) ? name : other;
  }
  static bool may_be_missing(const std::string& name, const io::LoadWeightsOptions& options) {
    return std::ranges::any_of(options.may_be_missing, [&](auto& part) { return belongs_to(name, part); });
  }
};

GRADACCUM_INLINE io::WeightsReport load_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                                                const io::LoadWeightsOptions& options) {
  const auto weights = tensors_of_module(module);
  check_options(options, weights);
  const io::WeightFiles files(path);
  auto [report, copies] = WeightCopies(weights, files, options);
  TORCH_CHECK(!options.strict || report.complete(), "load_weights: ", path.string(),
              " must have the weights of the module, and no others; {.strict = false} loads those that fit, "
              ".base_model_prefix and .may_be_missing say what may differ. Got ",
              report);
  const at::NoGradGuard no_grad;
  for (auto& [weight, name] : copies) {
    weight.copy_(files.get_tensor(name));
    files.release(name);  // otherwise the module would be in memory twice at the end
  }
  return report;
}

/// Returns the file for a path, which may be a folder; creates the folder if the path ends in a slash.
GRADACCUM_INLINE std::filesystem::path file_for_weights(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!path.has_filename()) make_directory(path);
  return std::filesystem::is_directory(path, ignored) ? path / weights_name : path;
}

GRADACCUM_INLINE void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                                   const io::Metadata& metadata) {
  io::save_file(tensors_of_module(module), file_for_weights(path), metadata);
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
