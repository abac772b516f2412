// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/safetensors_dtypes.hpp>
#include <gradaccum/detail/io/safetensors_layout.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gradaccum::detail {

/// What the header says about a tensor; throws where a file cannot have it.
inline SafetensorsEntry safetensors_entry(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "safetensors: the tensor ", in_quotes(name), " must be defined");
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.unsafeGetTensorImpl()->has_storage() && !tensor.is_meta() &&
                  !tensor.is_nested(),
              "safetensors: the tensor ", in_quotes(name), " must be dense and have its numbers in memory, got ",
              tensor.toString());
  const auto dtype = safetensors_dtype_of(tensor.scalar_type());
  TORCH_CHECK(dtype, "safetensors: the tensor ", in_quotes(name), " must have a dtype that safetensors has, got ",
              tensor.scalar_type());
  return {.dtype = std::string(*dtype), .shape = tensor.sizes().vec(), .begin = 0, .end = tensor.nbytes()};
}

/// Writes a safetensors file by `sink.write(const void*, std::size_t)`. What is contiguous in the memory of the CPU is
/// written from there; other tensors are copied, one at a time.
template <class Sink>
void write_safetensors(Sink& sink, const std::map<std::string, at::Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<NamedSafetensorsEntry> entries;
  for (auto& [name, tensor] : tensors) entries.emplace_back(name, safetensors_entry(name, tensor));
  const auto head = lay_out_safetensors(entries, metadata, "safetensors");
  sink.write(head.data(), head.size());
  const at::NoGradGuard no_grad;
  for (auto& [name, entry] : entries) {
    const auto plain = tensors.at(name).resolve_conj().resolve_neg().to(at::kCPU).contiguous();
    if (plain.numel() > 0) sink.write(plain.const_data_ptr(), plain.nbytes());
  }
}

}  // namespace gradaccum::detail
