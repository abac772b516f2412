// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/parallel/packed_values.hpp>
#include <gradaccum/process_group.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <sstream>
#include <string>
#include <variant>

namespace gradaccum::detail {

/// States of several ranks in one: rank 0's, and of the others what differs from it, under `rank_1.` and so on.
/// Parameters and optimizer are the same on all; random numbers and the place in the data are not.
class RankStates {
 public:
  explicit RankStates(const ProcessGroup& group) : group_(group) {}

  /// Rank 0's archive gets what the others have. All ranks call it.
  void gather(Archive& archive) const {
    const auto first = unpack(group_.all_gather(group_.rank() == 0 ? pack(fingerprints(archive.values())) : "")[0]);
    const auto own = group_.rank() == 0 ? Archive::Values() : what_differs(archive.values(), first);
    const auto all = group_.all_gather(pack(own));
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      auto values = static_cast<int>(rank) == group_.rank() ? own : unpack(all[rank]);
      exchange_tensors(values, static_cast<int>(rank));
      if (group_.rank() == 0) add(archive, values, prefix_of(static_cast<int>(rank)));
    }
  }

  /// Of what `gather` made, this rank's.
  static void pick(Archive::Values& values, int rank) {
    Archive::Values own;
    const auto prefix = prefix_of(rank);
    for (auto value = values.lower_bound("rank_"); value != values.end() && value->first.starts_with("rank_");) {
      if (!is_of_rank(value->first)) {  // a part of somebody's own
        ++value;
        continue;
      }
      if (value->first.starts_with(prefix)) own[value->first.substr(prefix.size())] = value->second;
      value = values.erase(value);
    }
    if (const auto missing = own.extract(missing_name)) erase(values, std::get<std::string>(missing.mapped()));
    for (auto& [name, value] : own) values[name] = value;
  }

 private:
  static constexpr const char* missing_name = "has not";  // names of what rank 0 has, a line each

  static std::string prefix_of(int rank) { return "rank_" + std::to_string(rank) + "."; }

  /// `rank_12.`
  static bool is_of_rank(const std::string& name) {
    const auto digits = name.find_first_not_of("0123456789", 5);
    return digits != name.npos && digits > 5 && name[digits] == '.';
  }

  static Archive::Values fingerprints(const Archive::Values& values) {
    auto prints = values;
    for (auto& [name, value] : prints)
      if (const auto* const tensor = std::get_if<at::Tensor>(&value)) value = fingerprint_of(*tensor);
    return prints;
  }

  static Archive::Values what_differs(const Archive::Values& values, const Archive::Values& first) {
    Archive::Values own;
    const auto prints = fingerprints(values);
    for (auto& [name, value] : values)
      if (const auto known = first.find(name); known == first.end() || !same(known->second, prints.at(name)))
        own[name] = value;
    std::string missing;
    for (auto& [name, value] : first)
      if (!values.contains(name)) missing += name + "\n";
    if (!missing.empty()) own[missing_name] = missing;
    return own;
  }
  /// To the bit: NaN is NaN.
  static bool same(const Archive::Value& a, const Archive::Value& b) { return pack({{"", a}}) == pack({{"", b}}); }

  void exchange_tensors(Archive::Values& values, int from) const {
    for (auto& [name, value] : values) {
      auto* const tensor = std::get_if<at::Tensor>(&value);
      if (tensor == nullptr || !tensor->defined()) continue;
      *tensor = tensor->cpu().contiguous();
      group_.broadcast(*tensor, from);
    }
  }

  static void add(Archive& archive, Archive::Values& values, const std::string& prefix) {
    for (auto& value : values) std::visit([&](auto& held) { archive(prefix + value.first, held); }, value.second);
  }
  static void erase(Archive::Values& values, const std::string& names) {
    std::istringstream lines(names);
    for (std::string name; std::getline(lines, name);) values.erase(name);
  }

  const ProcessGroup& group_;
};

}  // namespace gradaccum::detail
