// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/curves.hpp>

#include <gradaccum/archive.hpp>
#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/packed_curves.hpp>

#include <utility>

namespace gradaccum {

GRADACCUM_INLINE detail::Curve& Curves::at(std::string_view name) {
  const auto found = places_.find(name);
  if (found != places_.end()) return all_[found->second].curve;
  places_.emplace(std::string(name), all_.size());
  return all_.emplace_back(Named{std::string(name), {}}).curve;
}

GRADACCUM_INLINE void Curves::add(std::string_view name, std::int64_t update, double value) {
  at(name).add(update, value);
}

GRADACCUM_INLINE const detail::Curve* Curves::find(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &all_[found->second].curve;
}

GRADACCUM_INLINE void Curves::state(Archive& archive) {
  detail::PackedCurves packed;
  for (auto& [name, curve] : all_) packed.add(name, curve);
  archive("packed", packed);
  if (!archive.loading()) return;
  Curves loaded;
  packed.for_each([&loaded](std::string name, detail::Curve curve) { loaded.at(name) = std::move(curve); });
  archive.when_all_fit([this, loaded = std::move(loaded)] { *this = loaded; });
}

}  // namespace gradaccum
