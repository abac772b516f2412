// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

namespace gradaccum::detail {

/// Numbers and texts in a row, for another rank of the same program.
class Packed {
 public:
  explicit Packed(std::string bytes = {}) : bytes_(std::move(bytes)) {}
  const std::string& bytes() const { return bytes_; }
  bool at_end() const { return place_ == bytes_.size(); }

  template <class Number>
  requires std::is_arithmetic_v<Number>
  void put(Number number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  void put(std::string_view text) {
    put(static_cast<std::uint64_t>(text.size()));
    bytes_.append(text);
  }
  template <class Number>
  Number take() {
    Number number{};
    std::memcpy(&number, take(sizeof(number)).data(), sizeof(number));
    return number;
  }
  std::string take_text() { return std::string(take(take<std::uint64_t>())); }

 private:
  std::string_view take(std::uint64_t size) {
    TORCH_CHECK(size <= bytes_.size() - place_, "ProcessGroup: another rank sent less than it announced");
    const auto part = std::string_view(bytes_).substr(place_, size);
    place_ += size;
    return part;
  }

  std::string bytes_;
  std::size_t place_ = 0;
};

/// Values of an archive, of tensors what is needed to make room for them: their numbers go by themselves.
inline std::string pack(const Archive::Values& values) {
  Packed packed;
  for (auto& [name, value] : values) {
    packed.put(name);
    packed.put(static_cast<std::uint8_t>(value.index()));
    std::visit(
        [&]<class T>(const T& held) {
          if constexpr (std::is_same_v<T, std::string>) {
            packed.put(std::string_view(held));
          } else if constexpr (std::is_same_v<T, at::Tensor>) {
            packed.put(static_cast<std::int64_t>(held.defined() ? held.dim() : -1));
            if (!held.defined()) return;
            packed.put(static_cast<std::uint8_t>(held.scalar_type()));
            for (auto size : held.sizes()) packed.put(size);
          } else {
            packed.put(held);
          }
        },
        value);
  }
  return packed.bytes();
}

inline at::Tensor take_room(Packed& packed) {
  const auto dimensions = packed.take<std::int64_t>();
  if (dimensions < 0) return {};
  const auto dtype = static_cast<at::ScalarType>(packed.take<std::uint8_t>());
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < dimensions; ++i) sizes.push_back(packed.take<std::int64_t>());
  return at::empty(sizes, dtype);
}

inline Archive::Values unpack(const std::string& bytes) {
  Packed packed(bytes);
  Archive::Values values;
  while (!packed.at_end()) {
    const auto name = packed.take_text();
    switch (packed.take<std::uint8_t>()) {
      case 0:
        values[name] = packed.take<bool>();
        break;
      case 1:
        values[name] = packed.take<std::int64_t>();
        break;
      case 2:
        values[name] = packed.take<double>();
        break;
      case 3:
        values[name] = packed.take_text();
        break;
      default:
        values[name] = take_room(packed);
    }
  }
  return values;
}

}  // namespace gradaccum::detail
