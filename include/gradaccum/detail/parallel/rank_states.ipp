// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/rank_states.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace gradaccum::detail {

/// A sequence of numbers and strings as bytes.
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

GRADACCUM_INLINE std::string pack(const Archive::Values& values) {
  Packed packed;
  for (auto& [name, value] : values) {
    packed.put(name);
    packed.put(static_cast<std::uint8_t>(value.index()));
    std::visit(
        [&]<class T>(const T& held) {
          if constexpr (std::is_same_v<T, std::string>) {
            packed.put(std::string_view(held));
          } else if constexpr (std::is_same_v<T, at::Tensor>) {
            TORCH_INTERNAL_ASSERT(!held.defined());
          } else {
            packed.put(held);
          }
        },
        value);
  }
  return packed.bytes();
}

GRADACCUM_INLINE Archive::Values unpack(const std::string& bytes) {
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
        values[name] = at::Tensor();
    }
  }
  return values;
}

inline constexpr auto names_missing = "has not";  // names that rank 0 has and this rank lacks, one per line

GRADACCUM_INLINE std::string prefix_of_rank(int rank) { return "rank_" + std::to_string(rank) + "."; }

GRADACCUM_INLINE Archive::Values fingerprints_of(const Archive::Values& values) {
  auto prints = values;
  for (auto& [name, value] : prints)
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) value = fingerprint_of(*tensor);
  return prints;
}

/// Returns the values that differ from rank 0's, `first`, in which fingerprints replace tensors.
GRADACCUM_INLINE Archive::Values what_differs(const Archive::Values& values, const Archive::Values& first) {
  const auto to_the_bit = [](auto& value) { return pack({{"", value}}); };  // NaN equals NaN
  Archive::Values own;
  const auto prints = fingerprints_of(values);
  for (auto& [name, value] : values)
    if (const auto known = first.find(name);
        known == first.end() || to_the_bit(known->second) != to_the_bit(prints.at(name)))
      own[name] = value;
  std::string missing;
  for (auto& [name, value] : first)
    if (!values.contains(name)) missing += name + "\n";
  if (!missing.empty()) own[names_missing] = missing;
  return own;
}

/// Moves the defined tensors out of `values`, and adds the prefix to their names.
GRADACCUM_INLINE Archive taken_tensors(Archive::Values& values, const std::string& prefix) {
  auto taken = Archive::of_references();
  for (auto value = values.begin(); value != values.end();) {
    auto* const tensor = std::get_if<at::Tensor>(&value->second);
    if (tensor == nullptr || !tensor->defined()) {
      ++value;
      continue;
    }
    taken(prefix + value->first, *tensor);
    value = values.erase(value);
  }
  return taken;
}

GRADACCUM_INLINE void gather_states(Links& links, Archive& archive) {
  const bool is_first = links.rank() == 0;
  const auto first = unpack(links.all_gather(is_first ? pack(fingerprints_of(archive.values())) : "")[0]);
  auto own = is_first ? Archive::Values() : what_differs(archive.values(), first);
  if (!is_first) archive = taken_tensors(own, prefix_of_rank(links.rank()));
  const auto all = links.all_gather(pack(own));
  if (!is_first) return;
  for (int rank = 1; rank < links.world_size(); ++rank)
    for (auto& [name, value] : unpack(all[static_cast<std::size_t>(rank)]))
      std::visit([&, &key = name](auto& held) { archive(prefix_of_rank(rank) + key, held); }, value);
}

GRADACCUM_INLINE void pick_state(Archive::Values& values, int rank) {
  Archive::Values own;
  const auto prefix = prefix_of_rank(rank);
  for (auto value = values.lower_bound("rank_"); value != values.end() && value->first.starts_with("rank_");) {
    if (without_rank(value->first) == value->first) {  // a part whose name merely begins like that
      ++value;
      continue;
    }
    if (value->first.starts_with(prefix)) own[value->first.substr(prefix.size())] = value->second;
    value = values.erase(value);
  }
  if (const auto missing = own.extract(names_missing)) {
    std::istringstream lines(std::get<std::string>(missing.mapped()));
    for (std::string name; std::getline(lines, name);) values.erase(name);
  }
  for (auto& [name, value] : own) values[name] = value;
}

}  // namespace gradaccum::detail
