// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dynamic_tables.hpp>

#include <array>

namespace gradaccum::detail {

/// The tables together with all 256 numbers.
struct DynamicMap : DynamicTables {
  static constexpr int decades = 7;
  std::array<float, 256> values{};
};

const DynamicMap& signed_map();
const DynamicMap& unsigned_map();
/// The unsigned map for second moments, by whose roots steps are divided: no positive value rounds to 0, as its steps
/// would then be up to 30 times too large until it has grown again.
const DynamicMap& second_moment_map();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/dynamic_map.ipp>
#endif
