// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: io

#include <gradaccum/detail/io/formats.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
/// Validates the header first: its JSON, its names, and that the tensors fill the file without gaps or overlaps. Values
/// are not checked, and may be NaN. Writing to a tensor changes later results of this object, but neither the file nor
/// other `SafetensorsFile`s. The file may be replaced or removed; if another process truncates it, this one is killed
/// by SIGBUS: use `load_file` if that may happen.
///
/// Throws `std::runtime_error` with the file's name for an invalid file, and `c10::Error` for an unknown name or a
/// dtype that LibTorch lacks.
///
/// @note Does not synchronize. Takes memory only for the header, for tensors that are written to, and for copies of
/// tensors that are not aligned to their dtype's size.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  /// Returns the names of the tensors, sorted.
  std::vector<std::string> keys() const { return detail::keys_of(header_.tensors); }
  bool contains(const std::string& name) const { return header_.tensors.contains(name); }
  const Metadata& metadata() const { return header_.metadata; }
  const std::filesystem::path& path() const { return path_; }

  /// Returns a tensor on the CPU, which may outlive this object.
  at::Tensor get_tensor(const std::string& name) const;

  /// Frees the memory of a tensor's data, except for pages that it shares with other tensors, so that files may be
  /// larger than the memory. The next access reads from the disk again; writes to the tensor are lost.
  void release(const std::string& name) const;

 private:
  std::span<std::byte> bytes_of(const detail::SafetensorsEntry& entry) const;
  const detail::SafetensorsEntry& entry_of(const std::string& name) const;

  std::filesystem::path path_;
  std::shared_ptr<detail::MappedFile> file_;
  detail::SafetensorsHeader header_;
};

/// Loads all tensors of a safetensors file into memory on the CPU, like Python's `safetensors.torch.load_file`. Throws
/// like `SafetensorsFile`.
///
///     ga::io::save_file({{"x", x}}, "data.safetensors");
///     auto tensors = ga::io::load_file("data.safetensors");
///     std::cout << tensors.at("x").sizes() << "\n";
///
/// @note Does not synchronize.
Tensors load_file(const std::filesystem::path& path);

/// Writes tensors and metadata to a safetensors file, like Python's `safetensors.torch.save_file`.
///
///     ga::io::save_file({{"x", x}, {"y", y}}, "data.safetensors", {{"made by", "a test"}});
///
/// Python would write the same bytes, and equal tensors always give equal bytes. The file is written under a temporary
/// name, synced to the disk and renamed: if the process is killed, `path` is either the old file or the new one.
/// Tensors may be on any device and have any strides; tensors that share memory are written once each. Throws for
/// tensors that the format cannot store (undefined, sparse, quantised, complex doubles), and `std::runtime_error` with
/// the file's name for errors of the operating system; `path` is then unchanged.
///
/// @note Synchronizes with the device of tensors that are not on the CPU, and takes memory for one of them at a time.
void save_file(const Tensors& tensors, const std::filesystem::path& path, const Metadata& metadata = {});

}  // namespace gradaccum::io

namespace gradaccum::detail {

/// The dtypes that both safetensors and every supported LibTorch have.
inline constexpr std::array<std::pair<std::string_view, c10::ScalarType>, 16> safetensors_dtypes{
    {{"BOOL", c10::kBool},
     {"U8", c10::kByte},
     {"I8", c10::kChar},
     {"U16", c10::kUInt16},
     {"I16", c10::kShort},
     {"U32", c10::kUInt32},
     {"I32", c10::kInt},
     {"U64", c10::kUInt64},
     {"I64", c10::kLong},
     {"F16", c10::kHalf},
     {"BF16", c10::kBFloat16},
     {"F32", c10::kFloat},
     {"F64", c10::kDouble},
     {"C64", c10::kComplexFloat},
     {"F8_E4M3", c10::kFloat8_e4m3fn},
     {"F8_E5M2", c10::kFloat8_e5m2}}};

/// Throws if LibTorch lacks the dtype; the message names the file `path` and the tensor `name`.
c10::ScalarType dtype_in_file(const std::string& path, const std::string& name, std::string_view dtype);

/// Throws if a bool tensor has a byte other than 0 and 1, which would be undefined behaviour in C++.
void check_flags(const std::string& path, const std::string& name, c10::ScalarType type,
                 std::span<const std::byte> bytes);

/// Returns the header entry for a tensor of this name, dtype and shape. Throws if the format cannot store it.
SafetensorsEntry planned_entry(const std::string& name, c10::ScalarType dtype, const std::vector<std::int64_t>& shape);

/// Returns the header entries for tensors. Throws for one that the format cannot store.
std::vector<NamedSafetensorsEntry> entries_of(const io::Tensors& tensors);

using WriteBytes = std::function<void(const void* data, std::size_t size)>;

/// Writes a safetensors file of the tensors in `entries`, in any order. `tensor_of` provides one tensor at a time; it
/// is released before the next.
void write_safetensors(const WriteBytes& write, std::vector<NamedSafetensorsEntry> entries,
                       const std::function<at::Tensor(const std::string& name)>& tensor_of,
                       const io::Metadata& metadata);

/// Writes a safetensors file. Tensors are copied, one at a time, unless they are contiguous on the CPU.
void write_safetensors(const WriteBytes& write, const io::Tensors& tensors, const io::Metadata& metadata);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/safetensors.ipp>
#endif
