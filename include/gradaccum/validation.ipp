// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/validation.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>

#include <fmt/format.h>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE std::optional<double> Validation::operator[](std::string_view metric) const {
  if (const auto prefix = name + '/'; metric.starts_with(prefix))
    metric.remove_prefix(prefix.size());
  else if (name != "validation")
    return {};
  const auto number = found.metrics.find(metric);
  return number == found.metrics.end() ? std::nullopt : std::optional(number->second);
}

namespace detail {

/// A validation as part of a state.
struct ArchivedValidation {
  Validation& one;

  void state(Archive& archive) {
    archive("name", one.name);
    archive("update", one.update);
    archive("epoch", one.epoch);
    archive("samples", one.samples);
    archive("seconds", one.seconds);
    archive("items", one.found.items);
    archive("samples_found", one.found.samples);
    archive("seconds_found", one.found.seconds);
    auto metrics = std::vector(one.found.metrics.begin(), one.found.metrics.end());
    auto number = static_cast<std::int64_t>(metrics.size());
    archive("metrics", number);
    one.found.metrics.clear();
    for (std::int64_t i = 0; i < number; ++i) {  // no reserve(): `number` is untrusted; a missing entry throws
      std::pair<std::string, double> metric;
      if (!archive.loading()) metric = metrics[static_cast<std::size_t>(i)];
      archive(fmt::format("metric{}", i), metric.first);
      archive(fmt::format("value{}", i), metric.second);
      one.found.metrics.insert(std::move(metric));
    }
  }
};

GRADACCUM_INLINE void ValidationHistory::state(Archive& archive) {
  auto number = all.empty() ? std::nullopt : std::optional(static_cast<std::int64_t>(all.size()));
  archive("number", number);
  std::vector<Validation> archived;
  for (std::int64_t i = 0; i < number.value_or(0); ++i) {
    archived.push_back(archive.loading() ? Validation() : all[static_cast<std::size_t>(i)]);
    archive(fmt::format("{}", i), ArchivedValidation{archived.back()});
  }
  all = std::move(archived);
}

}  // namespace detail
}  // namespace gradaccum
