// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/io/json.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace gradaccum::detail {

static_assert(std::endian::native == std::endian::little, "safetensors: a file's numbers are read as they are");

/// The dtypes that both safetensors and all supported LibTorch have.
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

/// Nothing where LibTorch has none.
inline std::optional<c10::ScalarType> scalar_type_of(std::string_view dtype) {
  for (auto& [name, type] : safetensors_dtypes)
    if (name == dtype) return type;
  return {};
}

/// Throws where LibTorch has none.
inline c10::ScalarType dtype_in_file(const std::string& path, const std::string& name, std::string_view dtype) {
  const auto type = scalar_type_of(dtype);
  TORCH_CHECK(type, path, ": the tensor ", in_quotes(name), " must have a dtype of LibTorch, got ", dtype);
  return *type;
}

/// Other values of a C++ bool are undefined behaviour.
inline void check_flags(const std::string& path, const std::string& name, c10::ScalarType type,
                        std::span<const std::byte> bytes) {
  TORCH_CHECK(type != c10::kBool || std::ranges::all_of(bytes, [](std::byte byte) { return byte <= std::byte{1}; }),
              path, ": the tensor ", in_quotes(name), " must have flags of 0 and 1 only");
}

/// Nothing where safetensors has none.
inline std::optional<std::string_view> safetensors_dtype_of(c10::ScalarType type) {
  for (auto& [name, known] : safetensors_dtypes)
    if (known == type) return name;
  return {};
}

}  // namespace gradaccum::detail
