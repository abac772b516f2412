// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/formats.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

/// Writes a safetensors file of the tensors in `entries`, in any order. `tensor_of` provides one tensor at a time; it
/// is released before the next.
void write_safetensors(const std::function<void(const void* data, std::size_t size)>& write,
                       std::vector<NamedSafetensorsEntry> entries,
                       const std::function<at::Tensor(const std::string& name)>& tensor_of,
                       const std::map<std::string, std::string>& metadata);

/// Writes a safetensors file. Tensors are copied, one at a time, unless they are contiguous on the CPU.
void write_safetensors(const std::function<void(const void* data, std::size_t size)>& write,
                       const std::map<std::string, at::Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/io/safetensors.ipp>
#endif
