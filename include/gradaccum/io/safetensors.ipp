// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/safetensors.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/io/files.hpp>
#include <gradaccum/detail/io/json.hpp>
#include <gradaccum/detail/io/safetensors_tensors.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>

namespace gradaccum::io {

GRADACCUM_INLINE SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path),
      file_(std::make_shared<detail::MappedFile>(path)),
      header_(detail::SafetensorsHeaderReader(path.string()).read_file(file_->text())) {}

GRADACCUM_INLINE std::vector<std::string> SafetensorsFile::keys() const {
  std::vector<std::string> names;
  for (auto& [name, entry] : header_.tensors) names.push_back(name);
  return names;
}

GRADACCUM_INLINE const detail::SafetensorsEntry& SafetensorsFile::entry_of(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  TORCH_CHECK(found != header_.tensors.end(), path_.string(), ": must have a tensor ", detail::in_quotes(name),
              ", but has none");
  return found->second;
}

GRADACCUM_INLINE std::span<std::byte> SafetensorsFile::bytes_of(const detail::SafetensorsEntry& entry) const {
  return file_->bytes().subspan(header_.data_begin + entry.begin, entry.end - entry.begin);
}

GRADACCUM_INLINE void SafetensorsFile::release(const std::string& name) const {
  file_->release(bytes_of(entry_of(name)));
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
