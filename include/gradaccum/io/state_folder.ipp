// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/state_folder.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/listed_files.hpp>
#include <gradaccum/detail/io/manifest.hpp>
#include <gradaccum/detail/io/safetensors_header.hpp>
#include <gradaccum/detail/io/safetensors_tensors.hpp>
#include <gradaccum/detail/kernels/element_loop.hpp>
#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/version.hpp>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

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
