// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dynamic_tables.hpp>

#include <array>

namespace gradaccum::detail {

/// With all its numbers.
struct DynamicMap : DynamicTables {
  static constexpr int decades = 7;
  std::array<float, 256> values{};
};

const DynamicMap& signed_map();
const DynamicMap& unsigned_map();
/// For second moments, whose square roots steps are divided by: none that is above 0 becomes 0, however small it is
/// beside the largest of its block. Its steps would be up to 30 times too large until it has grown again.
const DynamicMap& second_moment_map();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/dynamic_map.ipp>
#endif
