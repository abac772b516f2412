// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/formats.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace gradaccum::detail {
class MappedFile;
}

namespace gradaccum::io {

/// Tensors by name.
using Tensors = std::map<std::string, at::Tensor>;
/// Strings about a file, by name.
using Metadata = std::map<std::string, std::string>;

/// A safetensors file whose tensors are read from the disk on first use, like Python's `safe_open`.
///
///     ga::io::save_file({{"weight", x}, {"bias", y}}, "weights.safetensors");
///     const ga::io::SafetensorsFile file("weights.safetensors");
///     for (auto& name : file.keys()) std::cout << name << ": " << file.get_tensor(name).sizes() << "\n";
///
/// The header is validated first: its JSON, its names, and that the tensors fill the file without gaps or overlaps. The
/// tensors' values are not, and may be NaN.
///
/// Writing to a tensor changes neither the file nor other `SafetensorsFile`s, but does change what this one returns
/// later. The file may be replaced, for example by `save_file`, or removed. If another process truncates it, this
/// process is killed (SIGBUS); if that may happen, use `load_file`.
///
/// Throws `std::runtime_error` with the file's name for an invalid file, and `c10::Error` for an unknown name or a
/// dtype that LibTorch lacks.
///
/// @note Does not wait for the device. Takes memory only for the header, for tensors that are written to, and for those
/// that are not aligned to their dtype's size, which are copies.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  /// Returns the names of the tensors, sorted.
  std::vector<std::string> keys() const;
  bool contains(const std::string& name) const { return header_.tensors.contains(name); }
  const Metadata& metadata() const { return header_.metadata; }
  const std::filesystem::path& path() const { return path_; }

  /// Returns a tensor on the CPU, which may outlive this object.
  at::Tensor get_tensor(const std::string& name) const;

  /// Frees the memory that holds a tensor's data, except for pages that it shares with others; otherwise the memory is
  /// held until this object and its tensors are gone. The next access reads from the disk again; writes to the tensor
  /// are lost. Useful for files larger than the memory.
  void release(const std::string& name) const;

 private:
  std::span<std::byte> bytes_of(const detail::SafetensorsEntry& entry) const;
  const detail::SafetensorsEntry& entry_of(const std::string& name) const;

  std::filesystem::path path_;
  std::shared_ptr<detail::MappedFile> file_;
  detail::SafetensorsHeader header_;
};

/// Loads all tensors of a safetensors file into memory, like Python's `safetensors.torch.load_file`.
///
///     ga::io::save_file({{"x", x}}, "data.safetensors");
///     auto tensors = ga::io::load_file("data.safetensors");
///     std::cout << tensors.at("x").sizes() << "\n";
///
/// The tensors are on the CPU. Throws like `SafetensorsFile`.
///
/// @note Does not wait for the device. Takes memory for all tensors.
Tensors load_file(const std::filesystem::path& path);

/// Writes tensors and metadata to a safetensors file, like Python's `safetensors.torch.save_file`.
///
///     ga::io::save_file({{"x", x}, {"y", y}}, "data.safetensors", {{"made by", "a test"}});
///
/// The file is byte for byte what Python would write, and the same tensors always give the same bytes. It is written
/// under a temporary name, synced to the disk and renamed: if the process is killed, `path` is either the old file or
/// the new one. Tensors may be on any device and have any strides; two that share memory are written twice.
///
/// Throws for tensors that the format cannot store (undefined, sparse, quantised, complex doubles), and
/// `std::runtime_error` with the file's name for errors of the operating system; `path` is then unchanged.
///
/// @note Waits for the device of tensors that are not on the CPU, and takes memory for one of them at a time.
void save_file(const Tensors& tensors, const std::filesystem::path& path, const Metadata& metadata = {});

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/safetensors.ipp>
#endif
