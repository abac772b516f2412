// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/safetensors_header.hpp>

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
/// Texts about a file, by name.
using Metadata = std::map<std::string, std::string>;

/// A safetensors file, whose tensors are read from the disk when they are used: Python's `safe_open`.
///
///     ga::io::save_file({{"weight", x}, {"bias", y}}, "weights.safetensors");
///     const ga::io::SafetensorsFile file("weights.safetensors");
///     for (auto& name : file.keys()) std::cout << name << ": " << file.get_tensor(name).sizes() << "\n";
///
/// The header is checked before anything is made of it: its JSON, its names, and that the tensors fill the file without
/// gaps or overlaps. What a tensor's numbers are is not: they may be NaN.
///
/// Writing to a tensor changes neither the file nor what another `SafetensorsFile` reads, but what this one gives the
/// next time. The file may be replaced, by `save_file` say, or removed; another process that makes it shorter ends this
/// one (SIGBUS). Where that can happen, read it by `load_file`.
///
/// Throws `std::runtime_error` with the file's name for a file that is not as it must be; `c10::Error` for a name that
/// it has not, and for a tensor of a dtype that LibTorch has not.
///
/// @note Does not wait for the device. Takes no memory but for the header, and for tensors that are written to
/// or that do not begin at a multiple of their dtype's size (the latter are copies).
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  /// The names of the tensors, sorted.
  std::vector<std::string> keys() const;
  bool contains(const std::string& name) const { return header_.tensors.contains(name); }
  const Metadata& metadata() const { return header_.metadata; }
  const std::filesystem::path& path() const { return path_; }

  /// On the CPU. It may outlive this object.
  at::Tensor get_tensor(const std::string& name) const;

  /// Lets go of the memory in which a tensor that was read is kept until this object and its tensors are gone, but for
  /// pages that it shares with others: who looks at it next reads it from the disk again. What was written to the
  /// tensor is lost there. For files larger than the memory.
  void release(const std::string& name) const;

 private:
  std::span<std::byte> bytes_of(const detail::SafetensorsEntry& entry) const;
  const detail::SafetensorsEntry& entry_of(const std::string& name) const;

  std::filesystem::path path_;
  std::shared_ptr<detail::MappedFile> file_;
  detail::SafetensorsHeader header_;
};

/// All tensors of a safetensors file in memory of their own: Python's `safetensors.torch.load_file`.
///
///     ga::io::save_file({{"x", x}}, "data.safetensors");
///     auto tensors = ga::io::load_file("data.safetensors");
///     std::cout << tensors.at("x").sizes() << "\n";
///
/// On the CPU. Throws as `SafetensorsFile` does.
///
/// @note Does not wait for the device. Takes the memory of all tensors.
Tensors load_file(const std::filesystem::path& path);

/// Writes tensors, and texts about them, to a safetensors file: Python's `safetensors.torch.save_file`.
///
///     ga::io::save_file({{"x", x}, {"y", y}}, "data.safetensors", {{"made by", "a test"}});
///
/// The file has the bytes that Python would write, the same for the same tensors. It is written beside `path`, synced
/// to the disk and renamed: killed at any moment, `path` is the old file or the new one. Tensors may be on any device
/// and of any strides; two that share memory are written twice.
///
/// Throws for tensors that a file cannot have (undefined, sparse, quantised, of complex doubles), and
/// `std::runtime_error` with the file's name for errors of the operating system; `path` is then as it was.
///
/// @note Waits for the device of tensors that are not on the CPU, and takes the memory of one of them at a
/// time.
void save_file(const Tensors& tensors, const std::filesystem::path& path, const Metadata& metadata = {});

}  // namespace gradaccum::io

#ifndef GRADACCUM_COMPILED
#include <gradaccum/io/safetensors.ipp>
#endif
