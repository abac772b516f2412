// SPDX-License-Identifier: Apache-2.0
// Reads and writes weights and states, in one file or in shards.
#pragma once

#include <gradaccum/io/save_sharded.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/io/weights.hpp>

#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/detail/kernels/kernel_loop.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <ostream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <type_traits>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::map<std::string, io::Tensors> tensors_by_file(const Archive& archive) {
  std::map<std::string, io::Tensors> files;
  for (auto& [name, value] : archive.values()) {
    const auto* const tensor = std::get_if<at::Tensor>(&value);
    if (!tensor || !tensor->defined()) continue;
    const auto dot = name.find('.');
    const auto file = dot == name.npos ? "state" : name.substr(0, dot);
    TORCH_CHECK(file != "state" || dot == name.npos, "Archive: no part may be named 'state', got the value '", name,
                "'");
    TORCH_CHECK(is_file_name(file),
                "Archive: the name of a part with tensors must be a valid file name (A-Z a-z 0-9 _ -), got '", file,
                "'");
    files[file].emplace(name.substr(dot == name.npos ? 0 : dot + 1), *tensor);
  }
  return files;
}

GRADACCUM_INLINE void check_can_be_written(const Archive& archive) { tensors_by_file(archive); }

inline constexpr const char* undefined_name = "undefined tensors";  // lists their names, one per line

GRADACCUM_INLINE std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

/// Reads each tensor once, into its own memory, and checks the file against the manifest's checksum.
GRADACCUM_INLINE io::Tensors read_listed_tensors(const std::filesystem::path& path, const Manifest::File& listed) {
  const auto what = path.string();
  const ListedFile file(path, listed);
  std::string text(static_cast<std::size_t>(std::min<std::uint64_t>(listed.bytes, 8)), '\0');
  auto crc = file.read(0, std::as_writable_bytes(std::span(text)));
  text.resize(static_cast<std::size_t>(safetensors_header_size(text, listed.bytes, what)));
  crc = file.read(8, std::as_writable_bytes(std::span(text)), crc);
  const auto data_begin = 8 + text.size();
  const auto header = parse_safetensors_header(text, listed.bytes - data_begin, what);

  constexpr std::size_t piece_of_tensor = std::size_t{4} << 20;  // bytes that a thread reads at a time
  io::Tensors tensors;
  struct Piece {
    std::uint64_t offset;
    std::span<std::byte> bytes;
    std::uint32_t crc = 0;
  };
  std::vector<Piece> pieces;
  for (auto& [name, entry] : header.tensors) {
    const auto& tensor = tensors[name] = at::empty(entry.shape, dtype_in_file(what, name, entry.dtype));
    const auto bytes = bytes_of(tensor);
    for (std::size_t at = 0; at < bytes.size(); at += piece_of_tensor)
      pieces.push_back(
          {data_begin + entry.begin + at, bytes.subspan(at, std::min(bytes.size() - at, piece_of_tensor))});
  }
  std::ranges::sort(pieces, {}, &Piece::offset);
  parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t i) {
    auto& piece = pieces[static_cast<std::size_t>(i)];
    piece.crc = file.read(piece.offset, piece.bytes);
  });
  for (auto& piece : pieces) crc = crc32_of_both(crc, piece.crc, piece.bytes.size());
  file.check(crc);
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
  for (auto& [name, tensors] : tensors_by_file(archive)) {
    OutputFile file(folder / (name + tensors_suffix));
    write_safetensors([&](auto* data, auto size) { file.write(data, size); }, tensors, {{"format", "pt"}});
    file.close();
    files[name + tensors_suffix] = {file.bytes(), file.crc32()};
  }
  return files;
}

GRADACCUM_INLINE Manifest manifest_of(const Archive& archive, StateFiles files) {
  Manifest manifest;
  std::string undefined;
  for (auto& value : archive.values())
    std::visit(
        [&, &name = value.first](auto& held) {
          if constexpr (!std::is_same_v<decltype(held), const at::Tensor&>)
            manifest.values[name] = held;
          else if (!held.defined())
            undefined += name + "\n";
        },
        value.second);
  if (!undefined.empty()) manifest.values[undefined_name] = undefined;
  manifest.files = std::move(files);
  manifest.gradaccum = plain_text(GRADACCUM_VERSION_MAJOR, ".", GRADACCUM_VERSION_MINOR, ".", GRADACCUM_VERSION_PATCH);
  manifest.libtorch = TORCH_VERSION;
  return manifest;
}

GRADACCUM_INLINE Archive::Values read_state(const std::filesystem::path& folder, bool mapped) {
  const auto manifest = read_manifest(folder);
  check_no_others(folder, manifest);
  Archive::Values values;
  for (auto& value : manifest.values) std::visit([&](auto& held) { values[value.first] = held; }, value.second);
  if (const auto undefined = values.extract(undefined_name)) {
    const auto* const names = std::get_if<std::string>(&undefined.mapped());
    TORCH_CHECK(names, folder.string(), ": the names of undefined tensors must be a text");
    std::istringstream lines(*names);
    for (std::string name; std::getline(lines, name);) values[name] = at::Tensor();
  }
  for (auto& [name, listed] : manifest.files) {
    const auto path = folder / name;
    const auto part = path.stem().string();
    for (auto& [key, tensor] : mapped ? map_listed_tensors(path, listed) : read_listed_tensors(path, listed)) {
      const auto full = part == "state" ? key : part + "." + key;
      const bool is_new = values.emplace(full, tensor).second;
      TORCH_CHECK(is_new, path.string(), ": the value '", full, "' is stored twice");
    }
  }
  return values;
}

/// Maps names to tensors, for each file.
using PlannedFiles = std::vector<std::map<std::string, io::PlannedTensor>>;

GRADACCUM_INLINE PlannedFiles divide_into_shards(const std::vector<io::PlannedTensor>& tensors,
                                                 std::uint64_t most_bytes) {
  TORCH_CHECK(most_bytes > 0, "SaveShardedOptions: shard_bytes must be > 0, got 0");
  PlannedFiles shards(1);
  std::set<std::string> names;
  std::uint64_t bytes = 0;
  for (auto& tensor : tensors) {
    TORCH_CHECK(names.insert(tensor.name).second, "save_sharded: each tensor must have a name of its own, got ",
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

/// Returns true also for a dangling link, so that errors name it.
GRADACCUM_INLINE bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
}

/// Returns the file or index that `path`, itself or as its folder, refers to.
GRADACCUM_INLINE std::filesystem::path weights_path(const std::filesystem::path& path) {
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  for (auto* name : {weights_name, weights_index_name})
    if (is_folder && is_there(path / name)) return path / name;
  for (auto* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"})
    if (is_folder ? is_there(path / name) : path.filename() == name)
      throw std::runtime_error(
          (is_folder ? path / name : path).string() +
          ": weights must be in safetensors files; a pickle can run any code and is not read. Run this in its folder "
          "to convert it to model.safetensors:\n"
          "python3 -c \"import glob, torch, safetensors.torch; safetensors.torch.save_file("
          "{n: t.clone(memory_format=torch.contiguous_format) for f in glob.glob('pytorch_model*.bin') "
          "for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}, "
          "'model.safetensors', {'format': 'pt'})\"");
  if (!is_folder) return path;
  throw std::runtime_error(path.string() + ": must have " + weights_name + " or " + weights_index_name +
                           ", got a folder without them; pass the path of the file itself if it has another name");
}

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

/// Returns the copies to make, as weights of the module and their names in the file, and reports all other names.
GRADACCUM_INLINE std::vector<std::pair<at::Tensor, std::string>> copies_of_weights(
    const io::Tensors& weights, const io::WeightFiles& files, const io::LoadWeightsOptions& options,
    io::WeightsReport& report) {
  const auto name_in_files = [&, prefix = options.base_model_prefix + "."](const std::string& name) {
    if (prefix == "." || files.contains(name)) return name;
    const auto other = name.starts_with(prefix) ? name.substr(prefix.size()) : prefix + name;
    return weights.contains(other) ? name : other;
  };
  std::vector<std::pair<at::Tensor, std::string>> copies;
  std::set<const void*> found;
  std::set<std::string> used;
  for (auto& [name, weight] : weights) {
    const auto name_there = name_in_files(name);
    if (!files.contains(name_there)) continue;
    found.insert(weight.unsafeGetTensorImpl());
    used.insert(name_there);
    check_can_be_loaded(name, weight);
    if (const auto problem = misfit(files.get_tensor(name_there), weight); problem.empty())
      copies.emplace_back(weight, name_there);
    else
      report.mis_shaped.push_back(name + ": " + problem);
  }
  for (auto& [name, weight] : weights) {
    if (found.contains(weight.unsafeGetTensorImpl())) continue;
    const bool may_be_missing =
        std::ranges::any_of(options.may_be_missing, [&whole = name](auto& part) { return belongs_to(whole, part); });
    (may_be_missing ? report.new_weights : report.missing).push_back(name);
  }
  for (auto& name : files.keys())
    if (!used.contains(name)) report.unexpected.push_back(name);
  for (auto& name : files.unlisted()) report.unexpected.push_back(name + " (not in the index)");
  return copies;
}

GRADACCUM_INLINE io::WeightsReport load_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                                                const io::LoadWeightsOptions& options) {
  const auto weights = tensors_of_module(module);
  check_options(options, weights);
  const io::WeightFiles files(path);
  io::WeightsReport report;
  const auto copies = copies_of_weights(weights, files, options, report);
  TORCH_CHECK(!options.strict || report.complete(), "load_weights: ", path.string(),
              " must have the weights of the module, and no others; pass {.strict = false} to load those that fit, or "
              ".base_model_prefix and .may_be_missing to allow differences. Got ",
              report);
  const at::NoGradGuard no_grad;
  for (auto& [weight, name] : copies) {
    weight.copy_(files.get_tensor(name));
    files.release(name);  // otherwise the module would be in memory twice at the end
  }
  return report;
}

GRADACCUM_INLINE void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                                   const io::Metadata& metadata) {
  std::error_code ignored;
  if (!path.has_filename()) make_directory(path);
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  io::save_file(tensors_of_module(module), is_folder ? path / weights_name : path, metadata);
}

}  // namespace gradaccum::detail

namespace gradaccum::io {

GRADACCUM_INLINE void write_state(const Archive& archive, const std::filesystem::path& folder) {
  detail::write_manifest(folder, detail::manifest_of(archive, detail::write_tensors(archive, folder)));
}

GRADACCUM_INLINE Archive::Values read_state(const std::filesystem::path& folder) {
  return detail::read_state(folder, /*mapped=*/false);
}

GRADACCUM_INLINE void save_sharded(const std::vector<PlannedTensor>& tensors, const std::filesystem::path& folder,
                                   const std::function<at::Tensor(const PlannedTensor&)>& make,
                                   const SaveShardedOptions& options) {
  const auto shards = detail::divide_into_shards(tensors, options.shard_bytes);
  detail::make_directory(folder);
  for (const auto* name : {detail::weights_name, detail::weights_index_name})
    if (detail::is_there(folder / name))
      throw std::runtime_error((folder / name).string() +
                               ": must not exist yet: save_sharded writes to a folder without weights");
  detail::WeightMap files;
  std::uint64_t bytes = 0, numbers = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto file = detail::shard_name(i + 1, shards.size());
    detail::save_shard(shards[i], folder / file, make, options.metadata);
    for (auto& [name, tensor] : shards[i]) {
      const auto size = detail::planned_entry(name, tensor.dtype, tensor.shape).end;
      bytes += size;
      numbers += size / c10::elementSize(tensor.dtype);
      files.emplace(name, file);
    }
  }
  if (shards.size() == 1) return;
  const auto index = detail::text_of_index(files, numbers, bytes);
  detail::replace_file(folder / detail::weights_index_name,
                       [&](detail::OutputFile& file) { file.write(index.data(), index.size()); });
}

GRADACCUM_INLINE WeightFiles::WeightFiles(const std::filesystem::path& path) : path_(detail::weights_path(path)) {
  if (!path_.string().ends_with(".index.json")) {
    const auto file = std::make_shared<const SafetensorsFile>(path_);
    for (auto& name : file->keys()) files_.emplace(name, file);
    return;
  }
  const auto fail = [this](const auto&... parts) {
    throw std::runtime_error(c10::str(path_.string(), ": ", parts...));
  };
  const auto index = detail::read_weights_index(detail::MappedFile(path_).text(), path_.string());
  std::map<std::string, File> listed;
  for (auto& [name, file] : index) listed[file];
  for (auto& [file, opened] : listed) {
    const auto listed_path = path_.parent_path() / file;
    std::error_code ignored;
    if (!std::filesystem::exists(listed_path, ignored))
      fail("lists ", file, ", which must be in the same folder but is not");
    opened = std::make_shared<const SafetensorsFile>(listed_path);
    for (auto& name : opened->keys())
      if (const auto [other, is_new] = files_.emplace(name, opened); !is_new)
        fail("the tensor ", detail::in_quotes(name), " must be in one file, got it in ",
             other->second->path().filename().string(), " and in ", file);
  }
  for (auto& [name, file] : index)
    if (const auto found = files_.find(name); found == files_.end() || found->second != listed.at(file))
      fail("lists the tensor ", detail::in_quotes(name), " in ", file, ", which must have it but does not");
  for (auto& [name, file] : files_)
    if (!index.contains(name)) unlisted_.push_back(name);
  for (auto& name : unlisted_) files_.erase(name);
}

GRADACCUM_INLINE const SafetensorsFile& WeightFiles::file_of(const std::string& name) const {
  const auto found = files_.find(name);
  TORCH_CHECK(found != files_.end(), path_.string(), ": must have a tensor ", detail::in_quotes(name),
              ", but does not");
  return *found->second;
}

GRADACCUM_INLINE std::ostream& operator<<(std::ostream& stream, const WeightsReport& report) {
  if (report.complete() && report.new_weights.empty()) return stream << "all weights fit";
  const auto print = [&stream](const char* heading, const std::vector<std::string>& lines) {
    if (!lines.empty()) stream << heading << " (" << lines.size() << "):" << detail::first_of(lines) << "\n";
  };
  print("missing", report.missing);
  print("unexpected", report.unexpected);
  print("mis-shaped", report.mis_shaped);
  print("new", report.new_weights);
  return stream;
}

}  // namespace gradaccum::io

#undef GRADACCUM_INLINE
