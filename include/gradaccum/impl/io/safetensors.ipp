// SPDX-License-Identifier: Apache-2.0
// Copies tensors to and from safetensors files whose header has been checked.
#pragma once

#include <gradaccum/io/safetensors.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::io {

GRADACCUM_INLINE SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path),
      file_(std::make_shared<detail::MappedFile>(path)),
      header_(detail::read_safetensors_header(file_->text(), path.string())) {}

GRADACCUM_INLINE const detail::SafetensorsEntry& SafetensorsFile::entry_of(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  TORCH_CHECK(found != header_.tensors.end(), path_.string(), ": must have a tensor ", detail::in_quotes(name),
              ", but does not");
  return found->second;
}

GRADACCUM_INLINE std::span<std::byte> SafetensorsFile::bytes_of(const detail::SafetensorsEntry& entry) const {
  return file_->bytes().subspan(header_.data_begin + entry.begin, entry.end - entry.begin);
}

GRADACCUM_INLINE void SafetensorsFile::release(const std::string& name) const {
  detail::discard_pages(bytes_of(entry_of(name)));
}

GRADACCUM_INLINE at::Tensor SafetensorsFile::get_tensor(const std::string& name) const {
  const auto& entry = entry_of(name);
  const auto dtype = detail::dtype_in_file(path_.string(), name, entry.dtype);
  const auto bytes = bytes_of(entry);
  detail::check_flags(path_.string(), name, dtype, bytes);
  if (!bytes.empty() && reinterpret_cast<std::uintptr_t>(bytes.data()) % c10::elementSize(dtype) == 0)
    return at::from_blob(
        bytes.data(), entry.shape, [file = file_](void*) {}, dtype);
  auto copy = at::empty(entry.shape, dtype);
  if (!bytes.empty()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  return copy;
}

GRADACCUM_INLINE Tensors load_file(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Tensors tensors;
  for (auto& name : file.keys()) tensors[name] = file.get_tensor(name).clone();
  return tensors;
}

GRADACCUM_INLINE void save_file(const Tensors& tensors, const std::filesystem::path& path, const Metadata& metadata) {
  detail::replace_file(path, [&](detail::OutputFile& file) {
    detail::write_safetensors([&](auto* data, auto size) { file.write(data, size); }, tensors, metadata);
  });
}

}  // namespace gradaccum::io

namespace gradaccum::detail {

static_assert(std::endian::native == std::endian::little, "safetensors: a file's numbers are read as they are");

GRADACCUM_INLINE c10::ScalarType dtype_in_file(const std::string& path, const std::string& name,
                                               std::string_view dtype) {
  const auto* const found = std::ranges::find(safetensors_dtypes, dtype, [](auto& known) { return known.first; });
  TORCH_CHECK(found != safetensors_dtypes.end(), path, ": the tensor ", in_quotes(name),
              " must have a dtype of LibTorch, got ", dtype);
  return found->second;
}

GRADACCUM_INLINE void check_flags(const std::string& path, const std::string& name, c10::ScalarType type,
                                  std::span<const std::byte> bytes) {
  TORCH_CHECK(type != c10::kBool || std::ranges::all_of(bytes, [](std::byte byte) { return byte <= std::byte{1}; }),
              path, ": the tensor ", in_quotes(name), " must have only bytes 0 and 1, as its dtype is bool");
}

GRADACCUM_INLINE SafetensorsEntry planned_entry(const std::string& name, c10::ScalarType dtype,
                                                const std::vector<std::int64_t>& shape) {
  const auto* const found = std::ranges::find(safetensors_dtypes, dtype, [](auto& known) { return known.second; });
  TORCH_CHECK(found != safetensors_dtypes.end(), "safetensors: the tensor ", in_quotes(name),
              " must have a dtype that safetensors has, got ", dtype);
  std::uint64_t bytes = c10::elementSize(dtype);
  for (const auto size : shape) {
    TORCH_CHECK(size >= 0 && !__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes),
                "safetensors: the tensor ", in_quotes(name), " must have sizes >= 0 and fewer than 2^64 bytes, got ",
                at::IntArrayRef(shape));
  }
  return {.dtype = std::string(found->first), .shape = shape, .begin = 0, .end = bytes};
}

GRADACCUM_INLINE SafetensorsEntry entry_of(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "safetensors: the tensor ", in_quotes(name), " must be defined");
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.unsafeGetTensorImpl()->has_storage() && !tensor.is_meta() &&
                  !tensor.is_nested(),
              "safetensors: the tensor ", in_quotes(name), " must be dense and have its numbers in memory, got ",
              tensor.toString());
  return planned_entry(name, tensor.scalar_type(), tensor.sizes().vec());
}

GRADACCUM_INLINE std::vector<NamedSafetensorsEntry> entries_of(const io::Tensors& tensors) {
  std::vector<NamedSafetensorsEntry> entries;
  for (auto& [name, tensor] : tensors) entries.emplace_back(name, entry_of(name, tensor));
  return entries;
}

GRADACCUM_INLINE void write_safetensors(const WriteBytes& write, const io::Tensors& tensors,
                                        const io::Metadata& metadata) {
  write_safetensors(
      write, entries_of(tensors), [&](const std::string& name) { return tensors.at(name); }, metadata);
}

GRADACCUM_INLINE void write_safetensors(const WriteBytes& write, std::vector<NamedSafetensorsEntry> entries,
                                        const std::function<at::Tensor(const std::string&)>& tensor_of,
                                        const io::Metadata& metadata) {
  const auto head = lay_out_safetensors(entries, metadata, "safetensors");
  write(head.data(), head.size());
  const at::NoGradGuard no_grad;
  for (auto& [name, entry] : entries) {
    const auto plain = tensor_of(name).resolve_conj().resolve_neg().to(at::kCPU).contiguous();
    if (plain.numel() > 0) write(plain.const_data_ptr(), plain.nbytes());
  }
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
