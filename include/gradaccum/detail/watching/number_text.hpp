// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <string>

namespace gradaccum::detail {

/// A number for people, of four digits: `0.4312`, `1.2e-05`, `18,760`; `NaN`, `∞`.
std::string number_text(double number);
/// `18,760`
std::string count_text(std::int64_t count);
/// A number for programs, from which they get the same bits: `0.43120000000000003`, `nan`.
std::string exact_text(double number);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/number_text.ipp>
#endif
